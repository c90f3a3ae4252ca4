"""One live replay under Ray, in a process of its own: `python -m bench.ray_replay UNITS …` prints a `Replayed` as JSON.

Each command is a Ray task with `num_cpus` = UNITS, or the nearest amount below that the action allows; reading, writing,
opening and closing are tasks without a core, as they take none under Tangram. What is done to be fair to Ray: its workers
are up before the first arrival and are kept; opening an environment does not count; commands have the priority that
they have under Tangram (Ray's own default is a niceness of 15, so that strangers would slow them down).

Ray listens on the loopback interface only, which it does where clusters are switched off, and asks for a token; its
dashboard is off and its files lie in a temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.local.stack import cores_here
from app.replay.live_trainer import StartingFiles, burn_command
from bench import ray_tasks
from bench.live_record import Act, MachineMeter, Replayed
from bench.live_trace import Workload, add_options, workload_of
from bench.ray_tasks import Done
from scheduler.sim.trace import Trace, TraceAction, Trajectory

OBJECT_STORE_BYTES = 128 << 20
SPARE_WORKERS = 4
SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}


def main() -> int:
    """Replay and print."""
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="tangram-ray-", dir="/tmp") as folder, running_ray(options.cores, Path(folder)) as ray:
        replay = RayReplay(ray, workload_of(options), options.units, options.cores, Path(folder))
        print(json.dumps(asdict(asyncio.run(replay.run()))))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("units", type=int)
    parser.add_argument("--cores", type=int, default=cores_here())
    add_options(parser)
    return parser.parse_args()


@contextmanager
def running_ray(cores: int, folder: Path):  # type: ignore[no-untyped-def]
    """Give Ray's module while a local Ray of `cores` cores runs, with its workers up."""
    # Ray reads its settings when it is imported.
    os.environ.update(SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray

    ray.init(
        address="local",
        num_cpus=cores,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder / "ray"),
        _system_config={"idle_worker_killing_time_threshold_ms": 3_600_000},
    )
    try:
        together = ray.remote(_at_the_same_time)
        for _ in range(3):
            meeting = [str(folder / secrets.token_hex(4)) for _ in range(2)]
            busy = [together.options(num_cpus=1).remote(meeting[0], cores) for _ in range(cores)]
            spare = [together.options(num_cpus=0).remote(meeting[1], SPARE_WORKERS) for _ in range(SPARE_WORKERS)]
            ray.get([*busy, *spare], timeout=60)
        yield ray
    finally:
        ray.shutdown()


def _at_the_same_time(meeting: str, count: int) -> None:
    """Return once `count` processes have come here, so that there must be as many workers."""
    with open(meeting, "ab", buffering=0) as file:
        file.write(b".")
    while os.path.getsize(meeting) < count:
        time.sleep(0.005)


class RayReplay:
    """A workload's trajectories as coroutines of one driver, which awaits object references."""

    def __init__(self, ray: Any, workload: Workload, units: int, cores: int, folder: Path) -> None:
        self._ray, self._workload, self._units, self._cores, self._folder = ray, workload, units, cores, folder
        self._trace: Trace = workload.trace()
        self._search_path = os.environ.get("PATH", os.defpath)
        self._acts: list[Act] = []
        self._files: dict[StartingFiles, Any] = {}
        self._tasks = {name: ray.remote(getattr(ray_tasks, name)) for name in _TASKS}
        self._meter = MachineMeter()
        self._last = 0.0

    async def run(self) -> Replayed:
        """Replay to the last result."""
        for start in {StartingFiles.of(trajectory) for trajectory in self._trace.trajectories}:
            self._files[start] = self._ray.put(start.files(self._workload.path.resolve().parent))
        self._meter = MachineMeter()
        began = time.monotonic()
        await asyncio.gather(*(self._trajectory(number, each, began) for number, each in enumerate(self._trace.trajectories)))
        first = began + min(trajectory.arrival_s for trajectory in self._trace.trajectories)
        return Replayed.of(f"ray:{self._units}", self._acts, self._last - first, self._meter.used_s, short=self._meter.short)

    async def _trajectory(self, number: int, trajectory: Trajectory, began: float) -> None:
        await asyncio.sleep(began + trajectory.arrival_s - time.monotonic())
        root = str(self._folder / f"environment-{number}")
        await self._start("open_environment", 0, root, self._files[StartingFiles.of(trajectory)])
        for step in trajectory.steps:
            await asyncio.sleep(step.think_s / self._workload.think_divisor)
            await asyncio.gather(*(self._one(root, action) for action in step.actions))
        await self._start("close_environment", 0, root)

    async def _one(self, root: str, action: TraceAction) -> None:
        began = time.perf_counter()
        done: Done = await self._submit(root, action)
        act_s = time.perf_counter() - began
        # What a rollout was recorded with: an agent's command may well fail.
        expected = action.extra.get("exit_code", 0)
        self._acts.append(Act(act_s=act_s, execution_s=done.execution_s, cpu_s=done.cpu_s, succeeded=done.exit_code == expected))
        self._last = time.monotonic()
        self._meter.look()

    def _submit(self, root: str, action: TraceAction) -> Any:
        if action.kind == "cpu.read_file":
            return self._start("read_file", 0, root, action.extra["path"])
        if action.kind == "cpu.write_file":
            return self._start("write_file", 0, root, action.extra["path"], action.extra.get("text", ""))
        units = amount(action, self._units, self._cores)
        command = action.command or burn_command(action)
        return self._start("run_command", units, root, command, units, action.timeout_s, self._search_path)

    def _start(self, name: str, cpus: int, *arguments: object) -> Any:
        return self._tasks[name].options(num_cpus=cpus, max_retries=0).remote(*arguments)


_TASKS = ("open_environment", "close_environment", "read_file", "write_file", "run_command")


def amount(action: TraceAction, wanted: int, cores: int) -> int:
    """Return the largest amount up to `wanted` and up to the machine that the action allows; its smallest where none is."""
    allowed = action.elasticity.units
    return max((units for units in allowed if units <= min(wanted, cores)), default=allowed[0])


if __name__ == "__main__":
    sys.exit(main())
