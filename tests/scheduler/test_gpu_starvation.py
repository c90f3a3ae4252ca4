"""What holds on GPU cells whatever comes: nobody waits too long for a swap, nothing is lost, no cell is granted twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.tuning import TUNING
from scheduler.model import UNLIMITED, ServiceSpec, Waiting, events
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from scheduler.sim.summary import ReplayRecord
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.elasticity import Elasticity

SERVICES = (
    ServiceSpec(name="hot", restore_s=0.5),
    ServiceSpec(name="warm", restore_s=0.5, max_concurrency=3),
    ServiceSpec(name="wide", cells=(2,), restore_s=1.0),
    ServiceSpec(name="cold", cells=(1, 2), restore_s=2.0),
    ServiceSpec(name="rare", restore_s=0.0),
)
SHARED = (
    *(ServiceSpec(name=name, memory_mb=memory_mb, restore_s=0.5) for name, memory_mb in (("rm", 30), ("judge", 40), ("large", 60))),
    ServiceSpec(name="many", memory_mb=30, restore_s=0.5, max_concurrency=2),
    ServiceSpec(name="silent", restore_s=0.5),
    ServiceSpec(name="wide", cells=(1, 2), memory_mb=20, restore_s=1.0),
)
"""Services of which some fit onto a cell of 80 MB together."""

LONGEST_S = 6.0
ASKS = st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 8), st.floats(0.1, LONGEST_S - 2.0)), min_size=20, max_size=100)


class Watched(Simulation):
    """Measures how long waiting actions had no instance that they could use, and looks for impatient ones beside idle cells."""

    longest_s, looks = 0.0, 0

    def run(self) -> ReplayRecord:
        self.since: dict[str, float] = {}
        return super().run()

    def _handle(self, event: events.Event, now: float) -> None:
        super()._handle(event, now)
        self.looks += 1
        groups, waiting_ones = self._core.pools.gpu.groups.values(), self._core.state.waiting.values()
        starving = False
        for waiting in waiting_ones:
            if any(self.usable(waiting, group, instance) for group in groups for instance in group.instances):
                self.since.pop(waiting.id, None)
            else:
                self.longest_s = max(self.longest_s, now - self.since.setdefault(waiting.id, now))
                starving = starving or now - waiting.received_at >= TUNING.aged_s
        for action_id in [each for each in self.since if each not in self._core.state.waiting]:
            self.longest_s = max(self.longest_s, now - self.since.pop(action_id))
        late = [waiting for waiting in waiting_ones if now - waiting.received_at > TUNING.aged_s]
        for waiting in late if not starving else ():
            assert all(group.free < waiting.least for group in groups), f"{waiting.id} waits beside idle cells"

    @staticmethod
    def usable(waiting: Waiting, group: CellGroup, instance: Instance) -> bool:
        fits = instance.service == waiting.action.service and len(instance.cell_ids) in waiting.units
        return fits and instance.evicting_for is None and bool(instance.active or not group.blocked(instance))


@given(ASKS, st.sampled_from([(1, 2), (1, 3), (1, 4), (2, 2)]), st.sampled_from([(SERVICES, UNLIMITED), (SHARED, 80)]))
def test_no_action_waits_longer_than_the_bound_for_an_instance_that_it_can_use(
    drawn: list[tuple[float, int, float]], nodes: tuple[int, int], place: tuple[tuple[ServiceSpec, ...], int]
) -> None:
    # Given more work than the cells can do, by services some of which are always asked for
    services, memory_mb = place
    at, asks, often = 0.0, [], [services[0]] * 4 + list(services)
    for number, (gap_s, pick, work_s) in enumerate(drawn):
        at += gap_s
        score = TraceAction(kind="gpu.score", service=often[pick].name, work_s=work_s, elasticity=Elasticity(units=often[pick].cells))
        asks.append(Trajectory(trajectory=str(number), arrival_s=at, steps=(Step(actions=(score,)),)))
    trace = Trace(trajectories=tuple(asks), services={spec.name: spec for spec in services})
    cluster = Cluster(nodes=nodes[0], cores=0, gpus=nodes[1], gpu_memory_mb=memory_mb)
    # When all of it is run, with books that raise where cells would not allow it
    run = Watched(trace, make_policy("elastic"), cluster)
    ended = run.run().actions
    # Then each had its turn in time, and each ended once
    assert run.looks
    assert run.longest_s <= TUNING.aged_s + len(services) * (TUNING.turn_s + LONGEST_S)
    assert sorted(record.trajectory for record in ended) == sorted(each.trajectory for each in asks)
    assert {record.status for record in ended} == {"succeeded"}
