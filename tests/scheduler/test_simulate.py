"""The virtual-time replay: what must hold for any trace, and named cases of queueing, restoring and failing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model import Limits, QuotaSpec, ServiceSpec
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from scheduler.sim.summary import ReplayRecord, summarise
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.elasticity import FLAT, Amdahl, Elasticity

POLICIES = ["elastic", "paper", "fcfs", "fixed:2", "static:2"]
SERVICES = {"rm": ServiceSpec(name="rm", restore_s=0.5), "judge": ServiceSpec(name="judge", cells=(1, 2), restore_s=2.0)}
QUOTAS = {"web": QuotaSpec(name="web", rate_per_s=2.0, concurrency=3)}


def cpu(work_s: float, units: tuple[int, ...] = (1,), parallel: float | None = None, **fields: Any) -> TraceAction:
    curve = FLAT if parallel is None else Amdahl(parallel)
    return TraceAction(kind="cpu.exec", work_s=work_s, elasticity=Elasticity(units=units, curve=curve), **fields)


def gpu(service: str, work_s: float) -> TraceAction:
    return TraceAction(kind="gpu.score", work_s=work_s, service=service)


def api(work_s: float) -> TraceAction:
    return TraceAction(kind="api.call", work_s=work_s, quota="web")


def rollout(name: str, *steps: Step | TraceAction, **fields: Any) -> Trajectory:
    each = tuple(step if isinstance(step, Step) else Step(actions=(step,)) for step in steps)
    return Trajectory(trajectory=name, steps=each, **fields)


def trace_of(*trajectories: Trajectory) -> Trace:
    return Trace(trajectories=trajectories, services=SERVICES, quotas=QUOTAS)


def simulate(trace: Trace, policy: str = "elastic", cluster: Cluster | None = None, **options: Any) -> ReplayRecord:
    return Simulation(trace, make_policy(policy), cluster or Cluster(cores=4), **options).run()


ACTIONS = st.one_of(
    st.builds(cpu, st.sampled_from([0.0, 0.3, 2.0, 8.0]), st.sampled_from([(1,), (2,), (1, 2, 4)]), st.sampled_from([None, 0.9])),
    st.builds(cpu, st.sampled_from([2.0, 8.0]), cpu_s=st.just(0.1), action_class=st.just("waits")),
    st.builds(gpu, st.sampled_from(["rm", "judge"]), st.sampled_from([0.0, 0.6])),
    st.builds(api, st.sampled_from([0.0, 0.8])),
    st.builds(TraceAction, kind=st.just("cpu.read_file"), work_s=st.just(0.01)),
)
STEPS = st.builds(Step, actions=st.lists(ACTIONS, min_size=1, max_size=3).map(tuple), think_s=st.sampled_from([0.0, 1.0, 4.0]))
TRAJECTORIES = st.lists(
    st.tuples(st.lists(STEPS, max_size=4), st.sampled_from([0.0, 1.0, 5.0]), st.sampled_from([None, 400, 900])), min_size=1, max_size=6
)


@given(drawn=TRAJECTORIES, policy=st.sampled_from(POLICIES), nodes=st.sampled_from([1, 2]), overhead_s=st.sampled_from([0.0, 0.5]))
def test_every_action_has_one_record_whose_parts_are_what_it_took(drawn: Any, policy: str, nodes: int, overhead_s: float) -> None:
    trace = trace_of(*(rollout(f"t{n}", *steps, arrival_s=at, memory_mb=mb) for n, (steps, at, mb) in enumerate(drawn)))
    cluster = Cluster(nodes=nodes, cores=4, gpus=2, memory_mb=1000)

    run = simulate(trace, policy, cluster, overhead_s=overhead_s)

    assert len(run.actions) == len({record.id for record in run.actions}) == sum(1 for _ in trace.actions())
    for record in run.actions:
        assert record.status == "succeeded", record
        assert min(record.queue_s, record.background_s, record.overhead_s, record.execution_s) >= -1e-9
        assert record.act_s == pytest.approx(record.ended_at - record.submitted_at, abs=1e-6)
        assert record.act_s >= record.floor_s - 1e-6
    check_capacity(run, cluster)
    document = summarise(run)
    assert document["floor_act"] <= document["mean_act"] + 1e-6
    parts = ("mean_queue", "mean_background", "mean_overhead", "mean_execution")
    assert document["mean_act"] == pytest.approx(sum(document[part] for part in parts))
    for share in (document["cpu_utilisation"], document["gpu_utilisation"]):
        assert 0.0 <= share <= 1.0 + 1e-9


def check_capacity(run: ReplayRecord, cluster: Cluster) -> None:
    """No more was granted than there was, and in the end nothing; no more was used, as far as records tell; calls kept to their quota."""
    granted = [cores for _, cores in run.cores_granted]
    assert all(0.0 <= cores <= cluster.cores * cluster.nodes for cores in granted)
    assert granted[-1:] in ([], [0.0])
    assert [at for at, _ in run.cores_granted] == sorted(at for at, _ in run.cores_granted)
    span_s = max(0.0, run.last_result_s - run.first_arrival_s)
    for prefix, capacity in (("cpu.exec", cluster.cores), ("gpu.", cluster.gpus)):
        used = sum(record.unit_seconds for record in run.actions if record.kind.startswith(prefix))
        assert used <= capacity * cluster.nodes * span_s + 1e-6
    starts = sorted((r.ended_at - r.execution_s, r.ended_at) for r in run.actions if r.kind == "api.call")
    for number, (start, _) in enumerate(starts):
        assert sum(begin <= start + 1e-9 < end - 1e-9 for begin, end in starts) <= 3
        if number:
            assert start >= starts[number - 1][0] + 0.5 - 1e-6


def test_an_action_that_runs_for_longer_than_it_may_is_timed_out() -> None:
    # Given limits that count on any number of cores, after a resize and in the background, but not while a core is missing there
    long = rollout("long", cpu(12.0, (1, 2, 4), 1.0, timeout_s=2.5))
    short = rollout("short", Step(actions=(cpu(2.0, (2,), timeout_s=2.0),), think_s=1.0))
    run = simulate(trace_of(long, short))
    assert [(one.trajectory, one.status, one.ended_at) for one in run.actions] == [("long", "timed_out", 2.5), ("short", "succeeded", 3.0)]
    # When many share one core
    crowd = [rollout(f"t{number}", cpu(4.0, timeout_s=3.0)) for number in range(6)]
    run = simulate(trace_of(*crowd), cluster=Cluster(cores=1))
    assert {one.status for one in run.actions} == {"timed_out"}
    assert [one.execution_s for one in run.actions] == [pytest.approx(3.0)] * 6
    assert run.last_result_s == pytest.approx(18.0) and any(one.background_s > 0.0 for one in run.actions)


def test_a_resized_action_does_all_of_its_work() -> None:
    # Given an action that scales perfectly, alone on four cores for a second, then beside one that needs two of them
    trace = trace_of(rollout("long", cpu(12.0, (1, 2, 4), 1.0)), rollout("short", Step(actions=(cpu(2.0, (2,)),), think_s=1.0)))
    run = simulate(trace)
    # Then it has done four core-seconds in the first second, four in the next two, and the rest on all cores again
    long, short = (next(r for r in run.actions if r.trajectory == name) for name in ("long", "short"))
    assert short.ended_at == pytest.approx(3.0)
    assert long.ended_at == pytest.approx(4.0)
    assert long.unit_seconds == pytest.approx(12.0)
    assert run.resizes == 2


@pytest.mark.parametrize(("speed", "last_s"), [(1.0, 9.0), (3.0, 7.0)])
def test_a_step_ends_with_the_last_of_its_actions_and_only_thinking_is_sped_up(speed: float, last_s: float) -> None:
    trace = trace_of(rollout("t", Step(actions=(cpu(1.0), cpu(5.0), cpu(2.0))), Step(actions=(cpu(1.0),), think_s=3.0)))
    run = simulate(trace, speed=speed)
    assert [record.ended_at for record in run.actions] == [1.0, 2.0, 5.0, last_s]


def test_restoring_counts_as_overhead() -> None:
    trace = trace_of(rollout("t", gpu("rm", 1.0), gpu("judge", 1.0), gpu("rm", 1.0), gpu("rm", 1.0)))
    run = simulate(trace, cluster=Cluster(gpus=1))
    assert [record.overhead_s for record in run.actions] == [0.5, 2.0, 0.5, 0.0]
    assert run.restores == summarise(run)["restores"] == 3
    assert run.last_result_s == pytest.approx(7.0)


@pytest.mark.parametrize(("policy", "cluster"), [("elastic", Cluster(cores=8, memory_mb=1000)), ("static:4", Cluster(cores=4))])
def test_waiting_for_a_sandbox_counts_as_queueing_of_the_first_action(policy: str, cluster: Cluster) -> None:
    # Given room for one trajectory at a time
    steps = (Step(actions=(cpu(2.0),), think_s=1.0), cpu(1.0))
    trace = trace_of(*(rollout(f"t{n}", *steps, memory_mb=800) for n in range(3)))
    run = simulate(trace, policy, cluster)
    assert [record.queue_s for record in run.actions] == pytest.approx([0.0, 0.0, 4.0, 0.0, 8.0, 0.0])
    assert [record.submitted_at for record in run.actions if record.queue_s] == pytest.approx([1.0, 1.0])
    assert run.last_result_s == pytest.approx(12.0)


@pytest.mark.parametrize("cpu_s", [None, 0.0])
def test_what_has_no_core_is_in_the_background_and_what_sleeps_there_executes(cpu_s: float | None) -> None:
    # Given one core, a long command, and others beside it that are busy all the time, or never
    others = [rollout(f"t{n}", Step(actions=(cpu(4.0, cpu_s=cpu_s),), think_s=5.0)) for n in range(3)]
    run = simulate(trace_of(rollout("long", cpu(60.0)), *others), cluster=Cluster(cores=1))
    figures = summarise(run)
    slept = [action for action in run.actions if action.trajectory != "long"]
    if cpu_s == 0.0:
        assert [(action.background_s, action.execution_s) for action in slept] == [pytest.approx((0.0, 4.0))] * 3
    else:
        assert min(figures["mean_background"], figures["by_kind"]["cpu.exec"]["mean_background"]) > 1.0
    assert figures["by_job"]["default"]["mean_background"] == figures["mean_background"]
    assert all(action.act_s == pytest.approx(action.ended_at - action.submitted_at) for action in run.actions)


def test_a_fixed_command_that_keeps_two_cores_busy_leaves_nothing_of_them_to_others() -> None:
    # Given two cores, a long command that computes on both of them, and a short one that gets what they leave
    long = cpu(20.0, (2,), cpu_s=40.0)
    trace = trace_of(rollout("long", long), rollout("short", Step(actions=(cpu(4.0),), think_s=1.0)))
    run = simulate(trace, cluster=Cluster(cores=2))
    # Then both have computed for 44 s on two cores
    assert run.last_result_s >= 22.0 - 1e-6


@pytest.mark.parametrize(
    ("action", "memory_mb", "reason"),
    [
        (cpu(1.0, (64,)), None, "needs 64 cores, the largest node has 4"),
        (cpu(1.0), 5000, "needs 5000 MB, the largest node has 1000 MB"),
        (cpu(1.0, requires=("docker",)), None, "no node has the labels docker"),
        (gpu("rm", 1.0), None, "nothing can ever run it here"),
    ],
)
def test_what_no_node_can_hold_ends_with_a_reason_and_does_not_hang(action: TraceAction, memory_mb: int | None, reason: str) -> None:
    trace = trace_of(rollout("impossible", action, action, memory_mb=memory_mb), rollout("usual", cpu(1.0)))
    run = simulate(trace, cluster=Cluster(cores=4, memory_mb=1000))
    impossible = [record for record in run.actions if record.trajectory == "impossible"]
    assert len(impossible) == 2
    assert impossible[0].reason == reason
    assert {record.status for record in impossible} <= {"failed", "rejected"}
    assert summarise(run)["failed"] == 2
    assert next(r for r in run.actions if r.trajectory == "usual").status == "succeeded"


def test_an_unused_sandbox_whose_lease_is_over_makes_room() -> None:
    # Given a trajectory that thinks for longer than its lease, and one that waits for its memory
    trace = trace_of(
        rollout("slow", Step(actions=(cpu(1.0),)), Step(actions=(cpu(1.0),), think_s=100.0), memory_mb=800),
        rollout("next", *[Step(actions=(cpu(1.0),), think_s=4.0)] * 12, arrival_s=20.0, memory_mb=800),
    )
    run = simulate(trace, cluster=Cluster(nodes=1, cores=4, memory_mb=1000), limits=Limits(lease_s=30.0))
    slow = [record for record in run.actions if record.trajectory == "slow"]
    assert [record.status for record in slow] == ["succeeded", "failed"]
    assert {record.status for record in run.actions if record.trajectory == "next"} == {"succeeded"}
    assert max(record.ended_at for record in run.actions if record.trajectory == "next") < 100.0


@pytest.mark.parametrize(("policy", "known"), [("elastic", False), ("paper", True), ("fcfs", True), ("fixed:2", True), ("static:2", True)])
def test_a_policy_knows_the_recorded_durations_or_learns_them(policy: str, known: bool) -> None:
    trace = coding_trace(20, 10, seed=5)
    run = simulate(trace, policy, Cluster(cores=16))
    # Every end is compared with what was expected of it, that of a command with work at least
    assert run.prediction is not None
    assert run.prediction.predictions >= len(run.actions)
    assert (run.prediction.factor_p90 == 1.0) == known
    again = simulate(trace, policy, Cluster(cores=16), known_durations=known)
    assert again.actions == run.actions


def coding_trace(trajectories: int, steps: int, seed: int) -> Trace:
    """Many rollouts of thinking, short commands and some parallel builds."""
    draw = random.Random(seed)
    made = []
    for number in range(trajectories):
        turns = []
        for _ in range(steps):
            build = draw.random() < 0.2
            action = cpu(draw.uniform(4.0, 12.0), (1, 2, 4, 8), 0.9) if build else cpu(draw.expovariate(1 / 0.3))
            turns.append(Step(actions=(action,), think_s=draw.expovariate(1 / 4.7)))
        made.append(rollout(f"t{number}", *turns, arrival_s=draw.uniform(0.0, 60.0), memory_mb=1024))
    return trace_of(*made)


def test_tokens_of_recorded_requests_are_paid_off_in_simulation_too() -> None:
    # Given 60 tokens a minute, and two rollouts of requests of 10 tokens each
    quotas = {name: QuotaSpec(name=name, account="acme", tokens_per_min=60.0) for name in ("chat", "embed")}
    calls = [TraceAction(kind="api.call", work_s=0.5, quota=name, tokens=10) for name in quotas]
    trace = Trace(trajectories=tuple(rollout(call.quota or "", call) for call in calls), quotas=quotas)
    # When they are replayed; then the second waits for the tokens of the first, which share its account
    assert [action.queue_s for action in simulate(trace).actions] == [0.0, 10.0]


def test_a_warm_service_is_restored_before_it_is_asked_for() -> None:
    # Given a trajectory that asks a service after a second; when that is warm or not, then it is restored once
    for warm, waited_s in ((True, 0.0), (False, 0.5)):
        services = {"rm": ServiceSpec(name="rm", restore_s=0.5, warm=warm)}
        asks = rollout("t", Step(think_s=1.0, actions=(gpu("rm", 1.0),)))
        run = simulate(Trace(trajectories=(asks,), services=services), cluster=Cluster(gpus=1))
        assert (run.restores, run.actions[0].overhead_s) == (1, waited_s)
