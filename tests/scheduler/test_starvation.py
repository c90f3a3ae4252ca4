"""No job starves: what one has waiting gets its part, however much another one has."""

from __future__ import annotations

from scheduler.policies import make_policy
from scheduler.sim.simulate import Cluster, Simulation
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory

STEPS = (Step(actions=(TraceAction(kind="cpu.exec", work_s=1.0, action_class="short"),)),)


def test_a_job_beyond_its_share_starves_no_more_than_its_share() -> None:
    # Given two jobs of which one always has as much waiting as the node can do, and the other came with a hundred
    many = tuple(Trajectory(trajectory=f"a{number}", job="many", steps=STEPS) for number in range(100))
    steady = tuple(Trajectory(trajectory=f"b{number}", job="steady", steps=STEPS, arrival_s=0.5 * number) for number in range(200))

    run = Simulation(Trace(trajectories=many + steady), make_policy("elastic", without=["preemption"]), Cluster(cores=2)).run()

    # Then both have had half of the node as long as both had something waiting
    begun = [record.job for record in run.actions if record.ended_at - record.execution_s <= 50.0]
    assert len(begun) >= 98
    assert 40 <= begun.count("many") <= 60
