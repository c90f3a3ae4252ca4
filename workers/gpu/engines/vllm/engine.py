"""The engine whose model is computed by a vLLM server, a process of its own.

The worker has no weights. It turns texts into token ids, asks the server over a Unix socket, and watches its process. The states of
`engines/lifecycle.py` mean:

| state | the server |
|---|---|
| absent | there is none |
| starting | it loads, until it has answered the questions of `engines/canary.py`; `/health` is good before that |
| resident | it is awake; each call first asks whether it sleeps, since a question to a sleeping server hangs |
| evicting | it goes to sleep: at level 1 weights move to host memory, at level 2 they are dropped; then GPU memory is measured |
| host | it sleeps and keeps its residue: context, graphs, workspaces |
| restoring | it is woken, reads its weights from the folder if they were dropped, and answers the same questions as at its start |
| failed | it is gone: its process ended, or it did not obey and was killed |

Since the weights belong to a process, a server cannot be restored to devices other than its own: there another server is started, which
counts as a start. On CPU devices sleeping frees nothing, so an evicted server is stopped there, and the engine is absent, unless
the service sets `vllm.sleep_on_cpu` for tests.

If a server dies, its running calls end with `EngineDied` and the engine is failed. All requests here may be repeated, so the caller may
start the engine again and repeat the call.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.services_file import ConfigError, ServiceConfig
from workers.gpu.call_control import CallControl
from workers.gpu.device_memory import DeviceMemory, Holdings, host_mb
from workers.gpu.devices import Device
from workers.gpu.engines import canary
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.canary import Answers
from workers.gpu.engines.vllm import questions
from workers.gpu.engines.vllm.api import Api, Gone, Refused
from workers.gpu.engines.vllm.command import Launch, interpreter
from workers.gpu.engines.vllm.reader import Reader, adapter_rank, read_folder
from workers.gpu.engines.vllm.server import Server
from workers.gpu.errors import BadInput, CallFailed, EngineDied, EngineFailed
from workers.gpu.items import Prompt, Sampling, ScoreItem, TokenLogprobs

SLEEP_S = 120.0
"""Seconds that going to sleep may take."""

_WAKING: dict[int, list[tuple[str, object]]] = {
    1: [("/wake_up", None)],
    2: [("/wake_up?tags=weights", None), ("/collective_rpc", {"method": "reload_weights"}), ("/wake_up?tags=kv_cache", None)],
}
"""What wakes a server, by the level at which it sleeps."""

_REQUESTS_AT_ONCE = 2
_FREE_S = 3.0
_FREED_FRACTION = 0.9
_POLL_S = 0.1
_END_S = 2.0
_ASK_S = 10.0
_HAS_VLLM_S = 60.0


@dataclass(slots=True)
class _Served:
    """A server and what is known of it."""

    server: Server
    api: Api
    launch: Launch
    holdings: Holdings
    """What it holds of its devices, as measured after its last change."""
    longest: int = 0
    """Tokens of the longest input that it takes."""
    host_mb: float = 0.0
    """MiB that it holds in host memory asleep."""
    sleep_level: int = 0
    """At which level it sleeps; 0: it is awake."""
    ending: bool = False
    """Whether the engine itself ends it."""


class VllmEngine(Engine):
    """A reward model or a teacher behind a vLLM server."""

    def __init__(self, name: str, config: ServiceConfig, state_dir: Path, memory: DeviceMemory) -> None:
        """Make an absent engine; nothing is checked before the first start.

        `state_dir` is the folder for the server's log, `memory` measures the devices.
        """
        super().__init__(name, config.task, config.max_concurrency)
        self._config, self._state_dir, self._memory = config, state_dir, memory
        self._reader: Reader | None = None
        self._served: _Served | None = None

    def start(self, devices: Sequence[Device], most_mb: float = math.inf) -> None:
        """Start a server and have it answer. Raises as every engine does."""
        super().start(devices, most_mb)
        self._must_be_there()

    def evict(self, drain_s: float = 60.0, copy: bool = True) -> None:
        """Put the server to sleep once the running calls have ended; on CPU devices stop it. Raises as every engine does."""
        served = self._served
        if self.state == "resident" and served is not None and not self._sleeps(served.launch):
            self.stop(drain_s)
        else:
            super().evict(drain_s, copy)
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

    def leaves_without_copy(self) -> bool:
        """Say whether the server can sleep at level 2: it drops its weights, and reads them again when it wakes.

        A server with LoRA adapters would lose those as well: `reload_weights` reads the model alone, and ends with an error in many
        versions (vLLM issue 39934).
        """
        served = self._served
        return served is not None and self._sleeps(served.launch) and not served.launch.with_adapters

    def held_mb(self) -> Sequence[float]:
        """Return the MiB that the server holds of each of its devices, as measured after its last change.

        Awake it takes all of its memory at the start. On CPU devices a sleeping server counts as nothing (`vllm.sleep_on_cpu`).
        """
        served = self._served
        if served is None or served.server.ended() is not None or (served.sleep_level and not served.launch.on_cuda):
            return ()
        return served.holdings.mb

    @property
    def measured_exactly(self) -> bool:
        """Whether the server was measured by its processes; otherwise by the change of its devices."""
        return self._served is None or self._served.holdings.exact

    @property
    def assumed(self) -> bool:
        """Whether what the server holds could not be measured at its last change."""
        return self._served is not None and self._served.holdings.assumed

    def host_mb(self) -> float:
        """Return the MiB of host memory that the processes of a sleeping server hold, as measured when it fell asleep.

        Every beat asks for it, and a measurement walks all pages of all processes.
        """
        served = self._served
        return served.host_mb if served is not None and served.sleep_level and served.server.ended() is None else 0.0

    def _start(self, devices: Sequence[Device]) -> None:
        self._free()
        if self._config.model is None:
            raise ConfigError(f"services.{self.name}.model: the vllm engine needs a model folder")
        self._reader = read_folder(self._config.model, self._config)
        rank = 0 if self._config.adapter is None else adapter_rank(self._config.adapter)
        python = interpreter(self._config, os.environ, sys.executable)
        self._must_have_vllm(python)
        device_mb, dtype = min(self._memory.total_mb(device) for device in devices), self._reader.dtype
        launch = Launch(name=self.name, config=self._config, dtype=dtype, devices=devices, device_mb=device_mb, adapter_rank=rank)
        # The devices of the CPU are one: a server holds what it holds once.
        holdings = Holdings(self._memory, devices if launch.on_cuda else devices[:1])
        holdings.begin()
        log = self._state_dir / f"vllm-{self.name}-{'-'.join(device.name.split()[0].replace(':', '') for device in devices)}.log"
        server = Server(log, lambda socket: launch.arguments(python, socket), launch.environment(os.environ, python))
        served = self._served = _Served(server, Api(server.socket), launch, holdings)
        server.watch(lambda: self._ended(served))

    def _evict(self) -> None:
        self._sleep(1)

    def _evict_without_copy(self) -> None:
        self._sleep(2)

    def _sleep(self, level: int) -> None:
        served = self._here()
        held_mb = sum(served.holdings.mb)
        served.holdings.begin()
        with self._explained(served):
            served.api.ask("POST", f"/sleep?level={level}&mode=wait", timeout_s=SLEEP_S)
            if not self._is_sleeping(served):
                raise RuntimeError("its server says that it does not sleep though it was asked to")
        served.sleep_level = level
        served.holdings.measure(_pids(served.server), self._config.vllm.process_mb)
        # The driver may take a moment to free anything.
        deadline = time.monotonic() + _FREE_S
        while served.launch.on_cuda and sum(served.holdings.mb) > _FREED_FRACTION * held_mb and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            served.holdings.measure(_pids(served.server), self._config.vllm.process_mb)
        served.host_mb = host_mb(_pids(served.server))

    def _restore(self, devices: Sequence[Device]) -> None:
        served = self._here()
        if not self.can_restore(devices):
            raise RuntimeError("its server cannot come back there: it does not answer or was started on other devices")
        deadline = time.monotonic() + self._config.vllm.start_timeout_s
        served.holdings.begin()
        with self._explained(served):
            for path, body in _WAKING[served.sleep_level]:
                served.api.ask("POST", path, body, timeout_s=max(_POLL_S, deadline - time.monotonic()))
            if self._is_sleeping(served):
                raise RuntimeError("its server sleeps on after it was woken")
            served.sleep_level = 0

    def _canary(self) -> list[Answers]:
        """Wait until the server has answered; then measure what it holds, since some of it comes with the first batches."""
        served, deadline = self._here(), time.monotonic() + self._config.vllm.start_timeout_s
        pooling = self._config.vllm.pooling
        with self._explained(served):
            try:
                served.longest = _longest(self._await_answer(served, ("GET", "/v1/models", None), deadline))
                asked = canary.questions(self._read().vocabulary, served.longest, canary.NEW_TOKENS)
                # One by one, so that each is a batch of its own and always of the same shape.
                requests = [questions.canary_request(self.name, self.task, ids, pooling) for ids in asked]
                said = [self._await_answer(served, request, deadline) for request in requests]
            except Refused as error:
                raise CallFailed(str(error)) from error
            answers = tuple(questions.read_canary(one, self.task, ids, pooling) for one, ids in zip(said, asked, strict=True))
        served.holdings.measure(_pids(served.server), self._config.memory_mb)
        return [answers]

    def _tolerance(self, before: Answers, *, same_model: bool) -> float:
        # Kernels are chosen anew at each batch. The worker does not know what `args` make of the dtype.
        stated = not any(word.startswith("--dtype") for word in self._config.vllm.args)
        return canary.tolerance(self._read().dtype if stated else "", before)

    def _free(self) -> None:
        served = self._served
        if served is not None:
            served.ending = True
            served.server.stop()
            served.api.close()
        self._served = None

    def _score(self, items: list[ScoreItem], control: CallControl) -> list[float]:
        served, reader = self._here(), self._read()
        ids = reader.texts.score_ids(items)
        reader.check(ids, "items", served.longest)
        parts = questions.portions(ids, served.launch.sequences)
        requests = [questions.score_request(self.name, part, self._config.vllm.pooling) for part in parts]
        answers = self._ask(served, requests, _REQUESTS_AT_ONCE, control)
        out: list[float] = []
        for part, answer in zip(parts, answers, strict=True):
            out += questions.read_scores(answer, len(part), len(out), self._config.vllm.pooling)
        return out

    def _logprobs(self, sequences: list[list[int]], top_k: int | None, control: CallControl) -> list[TokenLogprobs]:
        served, reader = self._here(), self._read()
        if (top_k or 0) > served.launch.most_top_k:
            raise BadInput(f"top_k: must be at most {served.launch.most_top_k}, the --max-logprobs of services.{self.name}.vllm.args")
        # One position is left for the token that vLLM always generates.
        reader.check(sequences, "sequences", served.longest - 1)
        top_k = None if top_k is None else min(top_k, reader.vocabulary)
        most_tokens = min(questions.MOST_TOKENS, questions.MOST_ENTRIES // (1 + (top_k or 0)))
        parts = questions.portions(sequences, served.launch.sequences, most_tokens)
        requests = [questions.logprobs_request(self.name, part, top_k or 0) for part in parts]
        out: list[TokenLogprobs] = []
        for part, answer in zip(parts, self._ask(served, requests, _REQUESTS_AT_ONCE, control), strict=True):
            out += questions.read_logprobs(answer, part, len(out), top_k)
        return out

    def _generate(self, prompts: list[Prompt], sampling: Sampling, control: CallControl) -> list[str]:
        served, reader = self._here(), self._read()
        ids = reader.texts.prompt_ids(prompts)
        reader.check(ids, "prompts", served.longest, sampling.max_tokens)
        requests = [questions.generate_request(self.name, prompt, sampling, index, reader.ends) for index, prompt in enumerate(ids)]
        answers = self._ask(served, requests, served.launch.sequences, control)
        return [reader.texts.text(questions.read_generated(answer, index, reader.ends)) for index, answer in enumerate(answers)]

    def _ask(self, served: _Served, requests: list[questions.Request], at_once: int, control: CallControl) -> list[object]:
        """Put questions to a server that is awake. Raises `EngineDied` if it is gone, or asleep unasked."""
        try:
            if self._is_sleeping(served, control):
                raise Gone("it sleeps, and nobody here asked it to")
            return served.api.ask_all(requests, at_once, control=control)
        except Refused as error:
            raise CallFailed(f"{self.name}: {error}") from error
        except Gone as error:
            raise EngineDied(f"{self.name}: {self._died(served, str(error))}") from error

    def _is_sleeping(self, served: _Served, control: CallControl | None = None) -> bool:
        timeout_s = None if control else _ASK_S
        answer = served.api.ask("GET", "/is_sleeping", timeout_s=timeout_s, control=control)
        sleeps = answer.get("is_sleeping") if isinstance(answer, dict) else None
        if not isinstance(sleeps, bool):
            raise Gone("it does not say whether it sleeps")
        return sleeps

    def _await_answer(self, served: _Served, request: questions.Request, deadline: float) -> object:
        """Ask until there is an answer, the server ends, or it is too late."""
        while True:
            try:
                return served.api.ask(*request, timeout_s=max(_POLL_S, deadline - time.monotonic()))
            except (Gone, TimeoutError) as error:
                if ended := served.server.ended(_POLL_S):
                    raise RuntimeError(f"its server ended with {ended} before it answered: {served.server.tail()}") from error
                if time.monotonic() > deadline:
                    within = f"within {self._config.vllm.start_timeout_s:g} s"
                    raise RuntimeError(f"its server did not answer {within}: {served.server.tail()}") from error

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


def _pids(server: Server) -> list[int]:
    return [process.pid for process in server.processes()]


def _longest(models: object) -> int:
    """Return the most tokens that the server takes, from its list of models."""
    try:
        return int(models["data"][0]["max_model_len"])  # type: ignore[index]
    except (LookupError, TypeError, ValueError) as error:
        raise RuntimeError("its server does not say how long an input may be") from error
