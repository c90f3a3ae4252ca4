"""All that only a GPU can show, in one command and one table.

`python -m bench.gpu_check` needs one CUDA GPU with 30 GB free, 20 GB of host memory and 12 GB of disk, and takes less than eight
minutes. All models have random weights and are made in place; nothing is downloaded. `--vllm-python` (or `TANGRAM_VLLM_PYTHON`) names an
interpreter that has vLLM; without one the checks of vLLM are not run, and say so. `--stand-ins` runs the same checks with small models
on the CPU and with made-up servers on a made-up GPU: then figures mean little, and only what must be right is judged.

| exit code | means |
|---|---|
| 0 | all targets are met |
| 1 | a target is missed, or a check failed or ran out of time |
| 2 | there is no CUDA here, or packages are missing |

Each check is a process of its own with a bound in time. One that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench.gpu_rows import NOT_JUDGED, Row, Setup

ALL_S = 470.0
"""Seconds for all checks together."""


@dataclass(frozen=True, slots=True)
class Check:
    """A function `module:name` that takes a `Setup` and returns rows, and the seconds that it may take."""

    name: str
    function: str
    most_s: float
    needs_vllm: bool = False


CHECKS = (
    Check("torch: one service", "bench.gpu_torch:one_service", 100.0),
    Check("torch: two services in turn", "bench.gpu_torch:in_turn", 80.0),
    Check("torch: three services", "bench.gpu_torch:three_services", 100.0),
    Check("torch: a worker that is killed", "bench.gpu_torch:killed", 60.0),
    Check("vLLM: two services in turn", "bench.gpu_vllm:in_turn", 240.0, needs_vllm=True),
    Check("vLLM: kills in each order", "bench.gpu_vllm:killed", 180.0, needs_vllm=True),
)


def main(words: Sequence[str] | None = None) -> int:
    """Run `python -m bench.gpu_check`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description="Check on a GPU what only a GPU can show.")
    parser.add_argument("--stand-ins", action="store_true", help="without a GPU: the CPU, and made-up servers on a made-up GPU")
    parser.add_argument("--vllm-python", type=Path, default=os.environ.get("TANGRAM_VLLM_PYTHON"), help="an interpreter that has vLLM")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if missing := [name for name in ("torch", "transformers", "safetensors", "celery") if importlib.util.find_spec(name) is None]:
        print(f"the checks need {', '.join(missing)}", file=sys.stderr)
        return 2
    if asked.run:
        return _run_here(asked.run, Setup(asked.folder, asked.stand_ins, asked.vllm_python))
    if not asked.stand_ins and not _cuda():
        print("there is no CUDA device here; --stand-ins runs the same checks without one", file=sys.stderr)
        return 2
    python = asked.vllm_python or _own_vllm()
    rows, deadline = list[Row](), time.monotonic() + ALL_S
    with tempfile.TemporaryDirectory(prefix="tangram-gpu-check-") as folder:
        for number, check in enumerate(CHECKS):
            if check.needs_vllm and not asked.stand_ins and python is None:
                rows.append(Row(check.name, "not run: no vLLM here"))
                continue
            print(f"{check.name} …", file=sys.stderr, flush=True)
            setup = Setup(Path(folder) / str(number), asked.stand_ins, python)
            rows += _run(check, setup, min(check.most_s, deadline - time.monotonic()))
    print(f"{_machine(asked.stand_ins, python)}\n\n| check | measured | target | met |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.check} | {row.measured} | {row.target} | {row.mark} |")
    print(f"\n{_counts(rows)}")
    return 1 if any(row.met is False for row in rows) else 0


def _counts(rows: Sequence[Row]) -> str:
    """Say in one line how many targets are met, missed, and mean nothing here."""
    marks = Counter(row.mark for row in rows)
    without = f", {marks[NOT_JUDGED]} {NOT_JUDGED}: they mean nothing without a GPU" if marks[NOT_JUDGED] else ""
    return f"targets: {marks['yes']} met, {marks['NO']} missed{without}"


def _run(check: Check, setup: Setup, most_s: float) -> list[Row]:
    """Run a check in a process of its own, and end all that it leaves."""
    setup.folder.mkdir(parents=True)
    words = [sys.executable, "-m", "bench.gpu_check", "--run", check.function, "--folder", str(setup.folder)]
    words += ["--stand-ins"] if setup.stand_ins else []
    words += ["--vllm-python", str(setup.vllm_python)] if setup.vllm_python else []
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if setup.stand_ins else dict(os.environ)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, env=env, text=True, start_new_session=True)
        try:
            out, _ = process.communicate(timeout=max(1.0, most_s))
        except subprocess.TimeoutExpired:
            return [Row(check.name, f"not over after {most_s:.0f} s", "an end", False)]
        finally:
            # The guards of servers that it leaves see the end of their pipes and end them.
            _end(process)
        if process.returncode:
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line.strip()][-1:] or ["it printed nothing"]
            print("\n".join(said), file=sys.stderr)
            return [Row(check.name, f"failed: {said[0][:200]}", "an end", False)]
    return [Row(**row) for row in json.loads(out.splitlines()[-1])]


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a check's process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run_here(function: str, setup: Setup) -> int:
    module, _, name = function.partition(":")
    rows = getattr(importlib.import_module(module), name)(setup)
    print(json.dumps([asdict(row) for row in rows]))
    return 0


def _cuda() -> bool:
    words = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(words, check=False).returncode == 0


def _own_vllm() -> Path | None:
    """Return this interpreter if it has vLLM itself."""
    return Path(sys.executable) if importlib.util.find_spec("vllm") else None


def _machine(stand_ins: bool, vllm_python: Path | None) -> str:
    from importlib.metadata import version

    host = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB of memory, Python {platform.python_version()}"
    versions = f"torch {version('torch')}, transformers {version('transformers')}"
    if stand_ins:
        return f"no GPU: stand-ins; {host}, {versions}"
    words = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpus = "; ".join(subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        gpus = "a CUDA GPU"
    if vllm_python is not None:
        words = [str(vllm_python), "-c", "from importlib.metadata import version; print(version('vllm'))"]
        versions += f", vLLM {subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout.strip() or '?'}"
    return f"{gpus}; {host}, {versions}"


if __name__ == "__main__":
    sys.exit(main())
