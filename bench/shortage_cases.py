"""What `bench.shortage` simulates: settings in which cores, or GPUs, are short.

A case can be pickled, so that another process can simulate it. Its name begins with its family:

| family     | what is replayed                                                                                         |
|------------|----------------------------------------------------------------------------------------------------------|
| `rollouts` | recorded rollouts on few cores, as `tangram replay TRACE --simulate --tile N --speed S --spread P` would |
| `coding`   | 256 AI-coding rollouts (`bench.workloads`) on 0.15 to 1 core for each                                    |
| `waiting`  | recorded rollouts whose commands need a core for 2 % of their time and wait for the rest                 |
| `mopd`     | 2048 trajectories that ask teachers (`bench.workloads`), on 24 GPUs                                      |
| `flood`    | the settings of `bench.flood`, calm and in the flood; ACT is that of the lightest job alone              |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, get_args

from app.replay.replay_command import ReplayOptions
from app.replay.traces import BUNDLED, read_trace
from bench import flood
from bench.live_trace import changed, on_cores
from bench.workloads import ai_coding, mopd
from scheduler.sim.trace import Trace, TraceAction

Half = Literal["first", "second", "all"]
HALVES: tuple[Half, ...] = get_args(Half)
FAMILIES = ("rollouts", "coding", "waiting", "mopd", "flood")

WAITING_BUSY = 0.02
"""The part of its time in which a command of `waiting` needs its core."""

CODING_TRAJECTORIES = 256
MOPD_TRAJECTORIES = 2048
NODE_MEMORY_MB = 2_400_000
FLOOD_SEED_STEP = 1000
"""Added to a setting's own seed for each seed of ours. `bench.flood` draws its three jobs from seeds less than this apart."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded rollouts: a trace, or every second trajectory of it.

    The first half holds the trajectories 1, 3, 5 … of the file and the second half 2, 4, 6 …. Parameters that were tuned on one
    half should be reported on the other. Without a file, the bundled rollouts are read, less the actions that use no cores.
    """

    file: Path | None = None
    half: Half = "all"

    def read(self) -> Trace:
        """Return the rollouts. Raises `TraceError`."""
        return _read(self)


@lru_cache(maxsize=2)
def _read(recording: Recording) -> Trace:
    if recording.file is None:
        read = Trace(trajectories=tuple(on_cores(each) for each in read_trace(BUNDLED).trajectories))
    else:
        read = read_trace(recording.file)
    halves = {"all": read.trajectories, "first": read.trajectories[::2], "second": read.trajectories[1::2]}
    return replace(read, trajectories=halves[recording.half])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setting: `trace` makes what is replayed from a seed, `options` say where and how.

    Policy and seed of the options are filled in for each run. With `job`, ACT is that of this job's actions alone.
    """

    name: str
    title: str
    trace: Callable[[Recording, int], Trace]
    options: ReplayOptions
    job: str | None = None

    @property
    def family(self) -> str:
        """Return which of `FAMILIES` it belongs to."""
        return self.name.partition("-")[0]


def all_cases() -> list[Case]:
    """Return every case, in the order in which they are shown."""
    return [*_rollouts(), *_coding(), *_waiting(), _mopd(), *_floods()]


def _rollouts() -> list[Case]:
    settings = (
        (24, 8.0, 20.0, 2),
        (48, 8.0, 20.0, 4),
        (64, 10.0, 20.0, 8),
        (64, 10.0, 20.0, 16),
        (256, 1.0, 60.0, 8),
        (256, 1.0, 60.0, 16),
        (256, 4.0, 60.0, 32),
    )
    return [
        Case(
            name=f"rollouts-{count}-{cores}",
            title=f"{count} recorded rollouts within {spread_s:g} s, speed {speed:g}, on {cores} cores",
            trace=_recorded,
            options=ReplayOptions(tile=count, speed=speed, spread_s=spread_s, cores=cores),
        )
        for count, speed, spread_s, cores in settings
    ]


def _waiting() -> list[Case]:
    return [
        Case(
            name=f"waiting-{cores}",
            title=f"64 recorded rollouts within 20 s, speed 10, on {cores} cores, commands busy for {WAITING_BUSY:.0%} of their time",
            trace=_mostly_waiting,
            options=ReplayOptions(tile=64, speed=10.0, spread_s=20.0, cores=cores),
        )
        for cores in (8, 4)
    ]


def _coding() -> list[Case]:
    return [
        Case(
            name=f"coding-{per_trajectory:g}",
            title=f"{CODING_TRAJECTORIES} AI-coding rollouts on {cores} cores",
            trace=_drawn_coding,
            options=ReplayOptions(cores=cores),
        )
        for per_trajectory, cores in ((0.15, 38), (0.25, 64), (0.5, 128), (1.0, 256))
    ]


def _mopd() -> Case:
    return Case(
        name="mopd",
        title=f"{MOPD_TRAJECTORIES} trajectories that ask teachers, on 24 GPUs",
        trace=_drawn_mopd,
        options=ReplayOptions(nodes=3, cores=8, gpus=8, memory_mb=NODE_MEMORY_MB),
    )


def _floods() -> list[Case]:
    found = []
    for number, setting in enumerate(flood.CASES, 1):
        for when, third in (("calm", setting.rollouts[2]), ("flood", setting.flood)):
            jobs = ", ".join(map(str, (*setting.rollouts[:2], third)))
            found.append(
                Case(
                    name=f"flood-{number}-{when}",
                    title=f"lightest of three jobs with {jobs} AI-coding rollouts, on {setting.nodes} × {setting.cores} cores",
                    trace=partial(_drawn_flood, setting, third),
                    options=ReplayOptions(nodes=setting.nodes, cores=setting.cores),
                    job=flood.LIGHTEST,
                )
            )
    return found


def _recorded(recording: Recording, seed: int) -> Trace:
    return recording.read()


def _mostly_waiting(recording: Recording, seed: int) -> Trace:
    return changed(recording.read(), _idle)


def _idle(action: TraceAction) -> TraceAction:
    return replace(action, cpu_s=WAITING_BUSY * action.work_s) if action.kind.startswith("cpu.") else action


def _drawn_coding(recording: Recording, seed: int) -> Trace:
    return ai_coding(CODING_TRAJECTORIES, seed)


def _drawn_mopd(recording: Recording, seed: int) -> Trace:
    return mopd(MOPD_TRAJECTORIES, seed)


def _drawn_flood(setting: flood.Case, third: int, recording: Recording, seed: int) -> Trace:
    return flood.three_jobs(replace(setting, seed=setting.seed + FLOOD_SEED_STEP * seed), third)
