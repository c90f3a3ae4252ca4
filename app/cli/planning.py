"""The command that says how many machines a trace needs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli import output, plan_output
from app.cli.common import MOST_OVERHEAD_S, AsJson, UsageError, app, check_size
from tangram.errors import InvalidAction
from tangram.settings import Settings


@app.command()
def plan(
    trace: Annotated[Path | None, typer.Argument(help="A trace, tangram.trace/1, as JSON Lines.")] = None,
    target_act: Annotated[float | None, typer.Option(help="Mean ACT that must be met, seconds.")] = None,
    target_step: Annotated[float | None, typer.Option(help="Step duration that must be met, seconds.")] = None,
    no_worse_than: Annotated[str | None, typer.Option(help="A policy whose mean ACT and step duration must be met.")] = None,
    than_cores: Annotated[int | None, typer.Option(min=1, help="The cores that this policy has.")] = None,
    within: Annotated[float, typer.Option(help="Per cent by which --no-worse-than may be missed.")] = 0.0,
    policy: Annotated[str, typer.Option(help="The policy to plan for: elastic, paper, fcfs, fixed:N or static:N.")] = "elastic",
    tile: Annotated[int | None, typer.Option(min=1, help="Repeat the trajectories, in order, to this number.")] = None,
    spread: Annotated[float, typer.Option(help="Seconds over which --tile spreads the arrivals.")] = 60.0,
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Draws of the arrivals at each of which the target must be met.")] = 3,
    speed: Annotated[float, typer.Option(help="Think times are divided by this.")] = 1.0,
    overhead: Annotated[float, typer.Option(help="Seconds that each action takes besides queueing and running.")] = 0.0,
    nodes: Annotated[int | None, typer.Option(min=1, help="So many nodes, whose cores are to be found; one by default.")] = None,
    cores_per_node: Annotated[int | None, typer.Option(min=1, help="Nodes of so many cores, which are to be counted.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs per node; by default the fewest are found.")] = None,
    memory_mb: Annotated[int | None, typer.Option(min=1, help="Memory per node, MB; by default without limit, and an answer.")] = None,
    gpu_memory_mb: Annotated[int, typer.Option(min=1, help="Memory per GPU, MB.")] = 80_000,
    label: Annotated[list[str] | None, typer.Option(help="A label that every node has; may be repeated.")] = None,
    cost: Annotated[Path | None, typer.Option(help="Prices, TOML: core_hour, gpu_hour, gb_hour. Cheapest instead of fewest.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, max=1024, help="Simulations at a time; by default one per core.")] = None,
    curve: Annotated[bool, typer.Option(help="Also simulate around the answer: curve, other loads, think times.")] = True,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure instead how far simulations are from live runs here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find how many machines meet a target.

    The answer is the fewest cores, GPUs, memory and quotas, found by simulation.
    """
    if calibrate:
        if any(target is not None for target in (target_act, target_step, no_worse_than)):
            raise UsageError("--calibrate measures and plans nothing: it takes no target")
        _calibrate(trace, as_json=as_json)
        return
    if trace is None:
        raise UsageError("Missing argument 'TRACE'")
    from app.planning.cases import with_limits
    from app.planning.document import plan_document
    from app.planning.planner import Planner
    from app.planning.pool import Simulations
    from app.planning.prices import read_prices
    from app.planning.request import Request
    from app.replay.replay_command import ReplayOptions
    from app.replay.traces import read_trace
    from scheduler.policies import make_policy

    if not 0 < speed < float("inf"):
        raise InvalidAction("--speed", f"must be above 0, not {speed}")
    if not 0 <= spread < float("inf"):
        raise InvalidAction("--spread", f"must be 0 or more, not {spread}")
    if not 0 <= overhead <= MOST_OVERHEAD_S:
        raise InvalidAction("--overhead", f"must be 0 or more and at most {MOST_OVERHEAD_S}, not {overhead}")
    check_size(nodes=nodes or 1, tile=tile, cores_per_node=cores_per_node, gpus=gpus)
    check_size(nodes=1, tile=None, than_cores=than_cores)
    for name in (policy, no_worse_than):
        if name is not None:
            make_policy(name)
    words = {"memory_mb": memory_mb, "gpu_memory_mb": gpu_memory_mb, "labels": tuple(label or ())}
    request = Request(
        base=ReplayOptions(speed=speed, tile=tile, spread_s=spread, overhead_s=overhead, **words),  # type: ignore[arg-type]
        policy=policy,
        target_act_s=target_act,
        target_step_s=target_step,
        no_worse_than=no_worse_than,
        than_cores=than_cores,
        within=within / 100,
        seeds=tuple(range(seeds)),
        nodes=nodes,
        cores_per_node=cores_per_node,
        gpus=gpus,
        prices=read_prices(cost) if cost is not None else None,
        extras=curve,
    )
    request.check()
    read = with_limits(read_trace(trace))
    calibration = _calibration(Settings())
    began = time.monotonic()
    with Simulations(read, processes or len(os.sched_getaffinity(0))) as simulations, plan_output.simulating() as progress:
        simulations.progress = progress
        found = Planner(request, simulations).plan()
        document = plan_document(found, read, simulations.done)
    document |= {"wall_s": time.monotonic() - began, "calibration": calibration}
    plan_output.show_plan(document, as_json=as_json)


def _calibration(settings: Settings) -> dict[str, Any] | None:
    """Return the last calibration; where it cannot be read, say so and go on without, as if there were none."""
    from app.planning.calibration import read_calibration
    from app.replay.trace_lines import TraceError

    try:
        return read_calibration(settings.state_dir)
    except TraceError as error:
        output.note(f"{error}; the plan goes on without: remove this file, or measure anew with --calibrate")
        return None


def _calibrate(trace: Path | None, *, as_json: bool) -> None:
    from app.planning.calibration import calibrate
    from app.replay.traces import BUNDLED

    result = calibrate(trace or BUNDLED, Settings(), output.progress_bar, output.note)
    plan_output.show_calibration(result, as_json=as_json)
