"""The engine whose model is computed by a vLLM server, a process of its own.

The worker has no weights. It turns texts into token ids, asks the server over a Unix socket, and watches its process. The states of
`lifecycle.py` mean:

| state | the server |
|---|---|
| absent | there is none |
| starting | it loads, until it has answered a question of the service's kind; `/health` is good before that |
| resident | it is awake; each call first asks whether it sleeps, since a question to a sleeping server hangs |
| evicting | it goes to sleep at level 1: weights move to host memory, the cache is dropped; then GPU memory is measured |
| host | it sleeps and holds at most 5 % of what it held, or `vllm.process_mb` a cell if that is more |
| restoring | it is woken and answers a question |
| failed | it is gone: its process ended, or it did not obey and was killed |

Since the weights belong to a process, a server cannot be restored to devices other than its own: there another server is started, which
counts as a start. On CPU devices sleeping frees nothing, so an evicted server is stopped there, and the engine is absent, unless
the service sets `vllm.sleep_on_cpu` for tests.

A server that says that it sleeps and keeps its memory reports it (`memory_mb`), and is then stopped. If a server dies, its running calls
end with `EngineDied` and the engine is failed. All requests here may be repeated, so the caller may start the engine again and
repeat the call.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.services_file import ConfigError, ServiceConfig
from workers.gpu.control import Control
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.vllm import questions
from workers.gpu.engines.vllm.api import Api, Gone, Refused
from workers.gpu.engines.vllm.command import Launch, interpreter, visible
from workers.gpu.engines.vllm.memory import Meter, host_mb, meter_for
from workers.gpu.engines.vllm.reader import Reader, adapter_rank, read_folder
from workers.gpu.engines.vllm.server import Server
from workers.gpu.errors import BadInput, CallFailed, EngineDied, EngineFailed
from workers.gpu.items import Sampling, ScoreItem

SLEEP_S = 120.0
"""Seconds that going to sleep may take."""

RESIDUAL_PART = 0.05
"""Part of its GPU memory that a sleeping server may keep."""

_REQUESTS_AT_ONCE = 2
_FREE_S = 3.0
_POLL_S = 0.1
_END_S = 2.0
_ASK_S = 10.0
_HAS_VLLM_S = 60.0


@dataclass(slots=True)
class _Served:
    """A server and what is known of it; memory is in MiB, over all its devices, as last measured."""

    server: Server
    api: Api
    launch: Launch
    meter: Meter
    longest: int = 0
    """Tokens of the longest input that it takes."""
    held_mb: float = 0.0
    residual_mb: float = 0.0
    """What it keeps of its devices asleep, as far as it may."""
    host_mb: float = 0.0
    """What it holds in host memory asleep."""
    asleep: bool = False
    ending: bool = False
    """Whether the engine itself ends it."""


class VllmEngine(Engine):
    """A reward model or a teacher behind a vLLM server."""

    def __init__(self, name: str, config: ServiceConfig, state_dir: Path, *, meter: Callable[[Device], Meter] = meter_for) -> None:
        """Make an absent engine; nothing is checked before the first start.

        `state_dir` is the folder for the server's log, `meter` makes what measures servers on a device.
        """
        super().__init__(name, config.task, config.max_concurrency)
        self._config, self._state_dir, self._meter = config, state_dir, meter
        self._reader: Reader | None = None
        self._served: _Served | None = None

    def start(self, devices: Sequence[Device], most_mb: float = math.inf) -> None:
        """Start a server and have it answer. Raises as every engine does."""
        super().start(devices, most_mb)
        self._must_be_there()

    def evict(self, drain_s: float = 60.0) -> None:
        """Put the server to sleep once the running calls have ended; on CPU devices stop it. Raises as every engine does."""
        served = self._served
        if self.state == "resident" and served is not None and not self._sleeps(served.launch):
            self.stop(drain_s)
        else:
            super().evict(drain_s)
            self._must_be_there()

    def restore(self, devices: Sequence[Device]) -> None:
        """Wake the server and have it answer. Raises as every engine does."""
        super().restore(devices)
        self._must_be_there()

    def can_restore(self, devices: Sequence[Device]) -> bool:
        """Say whether there is a server to wake, which still says that it sleeps, and these are its devices."""
        served = self._served
        if served is None or list(served.launch.devices) != list(devices):
            return False
        try:
            return self._is_sleeping(served)
        except (Gone, Refused, TimeoutError):
            return False

    def memory_mb(self) -> float:
        """Return the MiB that the server holds on its devices, as measured after its last change.

        vLLM takes all of its memory at the start. What the process of a sleeping server may keep is not counted.
        """
        served = self._served
        return served.held_mb if served is not None and served.server.ended() is None else 0.0

    def host_mb(self) -> float:
        """Return the MiB of host memory that the processes of a sleeping server hold, as measured when it fell asleep.

        Every beat asks for it, and a measurement walks all pages of all processes.
        """
        served = self._served
        return served.host_mb if served is not None and served.asleep and served.server.ended() is None else 0.0

    def residual_mb(self) -> float:
        """Return the MiB that the sleeping server's process keeps on each GPU, or, awake, that it then may keep."""
        served = self._served
        if served is None or not served.launch.on_cuda:
            return 0.0
        return (served.residual_mb if served.asleep else _most_residual_mb(served)) / len(served.launch.devices)

    def _start(self, devices: Sequence[Device]) -> None:
        self._free()
        if self._config.model is None:
            raise ConfigError(f"services.{self.name}.model: the vllm engine needs a model folder")
        self._reader = read_folder(self._config.model, self._config)
        rank = 0 if self._config.adapter is None else adapter_rank(self._config.adapter)
        python = interpreter(self._config, os.environ, sys.executable)
        self._must_have_vllm(python)
        meter, ids = self._meter(devices[0]), visible(os.environ, devices)
        device_mb, dtype = meter.device_mb(ids), self._reader.dtype
        launch = Launch(name=self.name, config=self._config, dtype=dtype, devices=devices, device_mb=device_mb, adapter_rank=rank)
        deadline = time.monotonic() + self._config.vllm.start_timeout_s
        meter.begin(ids)
        log = self._state_dir / f"vllm-{self.name}-{'-'.join(device.name.split()[0].replace(':', '') for device in devices)}.log"
        server = Server(log, lambda socket: launch.arguments(python, socket), launch.environment(os.environ, python))
        served = self._served = _Served(server, Api(server.socket), launch, meter)
        server.watch(lambda: self._ended(served))
        with self._explained(served):
            self._await_answer(served, deadline)
            served.longest = _longest(served.api.ask("GET", "/v1/models", timeout_s=_ASK_S))
        served.held_mb = meter.held_mb(server.processes())

    def _evict(self) -> None:
        served = self._here()
        with self._explained(served):
            served.api.ask("POST", "/sleep?level=1&mode=wait", timeout_s=SLEEP_S)
            if not self._is_sleeping(served):
                raise RuntimeError("its server says that it does not sleep though it was asked to")
        served.asleep = True
        served.held_mb = self._residual_mb(served)
        served.host_mb = host_mb(served.server.processes())

    def _restore(self, devices: Sequence[Device]) -> None:
        served = self._here()
        if not self.can_restore(devices):
            raise RuntimeError("its server cannot come back there: it does not answer or was started on other devices")
        deadline = time.monotonic() + self._config.vllm.start_timeout_s
        with self._explained(served):
            served.api.ask("POST", "/wake_up", timeout_s=self._config.vllm.start_timeout_s)
            if self._is_sleeping(served):
                raise RuntimeError("its server sleeps on after it was woken")
            served.asleep = False
            self._await_answer(served, deadline)
        served.held_mb = served.meter.held_mb(served.server.processes())

    def _free(self) -> None:
        served = self._served
        if served is not None:
            served.ending = True
            served.server.stop()
            served.api.close()
        self._served = None

    def _score(self, items: list[ScoreItem], control: Control) -> list[float]:
        served, reader = self._here(), self._read()
        ids = reader.texts.score_ids(items)
        reader.check(ids, "items", served.longest)
        parts = questions.portions(ids, served.launch.sequences)
        answers = self._ask(served, [self._score_request(part) for part in parts], _REQUESTS_AT_ONCE, control)
        out: list[float] = []
        for part, answer in zip(parts, answers, strict=True):
            out += questions.read_scores(answer, len(part), len(out), self._config.vllm.pooling)
        return out

    def _score_request(self, inputs: list[list[int]]) -> questions.Request:
        return questions.score_request(self.name, inputs, self._config.vllm.pooling)

    def _logprobs(self, sequences: list[list[int]], control: Control) -> list[list[float]]:
        served = self._here()
        # One position is left for the token that vLLM always generates.
        self._read().check(sequences, "sequences", served.longest - 1)
        parts = questions.portions(sequences, served.launch.sequences)
        answers = self._ask(served, [questions.logprobs_request(self.name, part) for part in parts], _REQUESTS_AT_ONCE, control)
        out: list[list[float]] = []
        for part, answer in zip(parts, answers, strict=True):
            out += questions.read_logprobs(answer, part, len(out))
        return out

    def _generate(self, prompts: list[str], sampling: Sampling, control: Control) -> list[str]:
        served, reader = self._here(), self._read()
        ids = reader.texts.prompt_ids(prompts)
        reader.check(ids, "prompts", served.longest, sampling.max_tokens)
        requests = [questions.generate_request(self.name, prompt, sampling, index, reader.ends) for index, prompt in enumerate(ids)]
        answers = self._ask(served, requests, served.launch.sequences, control)
        return [reader.texts.text(questions.read_generated(answer, index, reader.ends)) for index, answer in enumerate(answers)]

    def _ask(self, served: _Served, requests: list[questions.Request], at_once: int, control: Control) -> list[object]:
        """Put questions to a server that is awake. Raises `EngineDied` if it is gone, or asleep unasked."""
        try:
            if self._is_sleeping(served, control):
                raise Gone("it sleeps, and nobody here asked it to")
            return served.api.ask_all(requests, at_once, control=control)
        except Refused as error:
            raise CallFailed(f"{self.name}: {error}") from error
        except Gone as error:
            raise EngineDied(f"{self.name}: {self._died(served, str(error))}") from error

    def _is_sleeping(self, served: _Served, control: Control | None = None) -> bool:
        timeout_s = None if control else _ASK_S
        answer = served.api.ask("GET", "/is_sleeping", timeout_s=timeout_s, control=control)
        sleeps = answer.get("is_sleeping") if isinstance(answer, dict) else None
        if not isinstance(sleeps, bool):
            raise Gone("it does not say whether it sleeps")
        return sleeps

    def _await_answer(self, served: _Served, deadline: float) -> None:
        """Ask a short question of the service's kind until it is answered, the server ends, or it is too late."""
        probe = [[0, 0]]
        request = self._score_request(probe) if self.task == "score" else questions.logprobs_request(self.name, probe)
        while True:
            try:
                answer = served.api.ask(*request, timeout_s=max(_POLL_S, deadline - time.monotonic()))
            except (Gone, TimeoutError) as error:
                if ended := served.server.ended(_POLL_S):
                    raise RuntimeError(f"its server ended with {ended} before it answered: {served.server.tail()}") from error
                if time.monotonic() > deadline:
                    within = f"within {self._config.vllm.start_timeout_s:g} s"
                    raise RuntimeError(f"its server did not answer {within}: {served.server.tail()}") from error
                continue
            if self.task == "score":
                questions.read_scores(answer, 1, 0, self._config.vllm.pooling)
            else:
                questions.read_logprobs(answer, probe, 0)
            return

    def _residual_mb(self, served: _Served) -> float:
        """Return what a sleeping server still holds, MiB, or 0 where that is no more than it may keep."""
        launch = served.launch
        if not launch.on_cuda and launch.config.vllm.sleep_on_cpu:
            return 0.0
        may_keep = _most_residual_mb(served)
        deadline = time.monotonic() + _FREE_S
        while (kept := served.meter.held_mb(served.server.processes())) > may_keep and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        served.residual_mb = min(kept, may_keep)
        return kept if kept > may_keep else 0.0

    def _ended(self, served: _Served) -> None:
        """Note that a server's process has ended; called in the thread that watches it."""
        if not served.ending:
            self._died(served, "")

    def _must_be_there(self) -> None:
        """Raise `EngineFailed` if the server ended at the moment when the last change did."""
        served = self._served
        if served is not None and served.server.ended() is not None:
            raise EngineFailed(f"{self.name}: {self._died(served, '')}")

    @contextmanager
    def _explained(self, served: _Served) -> Iterator[None]:
        """Make the error of a change say how its server ended."""
        try:
            yield
        except Gone as error:
            raise RuntimeError(self._end_of(served, str(error))) from error

    def _end_of(self, served: _Served, why: str) -> str:
        """Say in one line how a server ended, or why it is killed."""
        ended = served.server.ended(_END_S)
        what = f"its server ended by itself with {ended}" if ended else f"its server was killed: {why}"
        return f"{what}: {served.server.tail()}"

    def _died(self, served: _Served, why: str) -> str:
        """Kill a server that is broken or gone, and be failed. Returns the reason, one line."""
        reason = self._end_of(served, why)
        served.ending = True
        try:
            served.server.stop()
        except TimeoutError as error:
            # Its memory stays counted, and the next start tries to end it again.
            reason = f"{error}; {reason}"
        if self._served is served:
            self._life.broke(reason)
        served.api.close()
        return reason

    def _sleeps(self, launch: Launch) -> bool:
        return launch.on_cuda or launch.config.vllm.sleep_on_cpu

    def _must_have_vllm(self, python: Path) -> None:
        """Raise `ConfigError` if the interpreter cannot be run or has no vLLM, which is not imported."""
        probe = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('vllm') is None else 0)"
        key = f"services.{self.name}.vllm.python"
        try:
            done = subprocess.run([python, "-I", "-c", probe], capture_output=True, timeout=_HAS_VLLM_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{key}: {python} cannot be run: {error}") from error
        if done.returncode:
            raise ConfigError(f"{key}: there is no vllm in the environment of {python}")

    def _here(self) -> _Served:
        if self._served is None:
            raise EngineDied(f"{self.name}: its server has gone")
        return self._served

    def _read(self) -> Reader:
        if self._reader is None:
            raise BadInput(f"{self.name}: its model folder has not been read")
        return self._reader


def _most_residual_mb(served: _Served) -> float:
    """Return the MiB that a server that is awake may keep when it sleeps, over all its devices."""
    return max(RESIDUAL_PART * served.held_mb, served.launch.config.vllm.process_mb * len(served.launch.devices))


def _longest(models: object) -> int:
    """Return the most tokens that the server takes, from its list of models."""
    try:
        return int(models["data"][0]["max_model_len"])  # type: ignore[index]
    except (LookupError, TypeError, ValueError) as error:
        raise RuntimeError("its server does not say how long an input may be") from error
