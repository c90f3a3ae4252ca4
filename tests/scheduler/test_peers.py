"""The scheduler of one shard among others: what is not its own it refuses, and what jobs hold elsewhere it knows."""

from __future__ import annotations

from scheduler.live.heartbeats import HOUSEKEEPING_S
from scheduler.model import events
from tangram.shards import shard_of
from tangram.wire import WireLoad
from tests.scheduler.deployed import Deployment

SHARDS = 3


class Said(Deployment):
    """The first of three shards, whose transport hears what a test says; `heard` is what it said itself."""

    def __init__(self) -> None:
        super().__init__(shard=0, shards=SHARDS)
        self.start("elastic")
        self.said: list[WireLoad] | None = []
        self.heard: list[WireLoad] = []
        self.known: list[events.HeldElsewhere] = []
        self.transport.exchange = self._exchange  # type: ignore[method-assign]

    def _exchange(self, load: WireLoad) -> list[WireLoad] | None:
        self.heard.append(load)
        return self.said

    def handled(self, event: events.Event, now: float, out: object) -> None:
        super().handled(event, now, out)  # type: ignore[arg-type]
        if isinstance(event, events.HeldElsewhere):
            self.known.append(event)


def load(job: str, cores: int, memory_mb: int = 0) -> WireLoad:
    units, memory = ({"offered": {name: 100}, "held": {job: {name: held}}} for name, held in (("cores", cores), ("memory_mb", memory_mb)))
    return {"cores": 100, "labels": [], "kinds": [], "environments": 0, "opening": 0, "units": units, "memory": memory}  # type: ignore[typeddict-item]


def test_an_action_on_an_environment_of_another_shard_is_refused_with_its_shard() -> None:
    deployment = Deployment(shard=0, shards=SHARDS)
    deployment.start()
    deployment.join()
    names = {shard: next(f"e{n}" for n in range(100) if shard_of(f"e{n}", SHARDS) == shard) for shard in range(SHARDS)}
    deployment.open(names[0])
    deployment.exec("own", names[0])
    deployment.open(names[1], finish=False)
    deployment.exec("other", names[2])
    assert deployment.running == ["own"]
    assert deployment.broker.end("other") == deployment.broker.end(f"open-{names[1]}") == ("rejected", "bad_input")


def test_each_housekeeping_says_what_the_shard_carries() -> None:
    deployment = Said()
    deployment.join(cores=8, labels=["gpu"])
    deployment.join("drained", cores=4)
    deployment.asked({"drain": {"node": "drained", "draining": True}})
    own = next(f"e{n}" for n in range(100) if shard_of(f"e{n}", SHARDS) == 0)
    deployment.open(own, memory_mb=10)
    deployment.wait(HOUSEKEEPING_S)
    said = deployment.heard[-1]
    assert (said["cores"], said["labels"], said["environments"], said["opening"]) == (8, ["gpu"], 1, 0)
    assert said["kinds"] == [{"labels": ["gpu"], "memory_mb": 1000}, {"labels": [], "memory_mb": 1000}]
    assert said["units"]["offered"]["cores"] == 12 and said["memory"]["held"]["default"]["memory_mb"] >= 10


def test_what_jobs_hold_elsewhere_is_told_to_the_core_when_it_changes_and_only_while_it_is_said() -> None:
    deployment = Said()
    deployment.join(cores=100)
    shares, memory = deployment.core.state.shares, deployment.core.memory_shares
    for cores in (20, 20, 40):
        deployment.said = [load("a", cores, memory_mb=70), load("a", 30)]
        deployment.wait(HOUSEKEEPING_S)
    # Then the core heard of it twice, and 70 of 300 cores are the job's
    assert [dict(one.units.held["a"]) for one in deployment.known] == [{"cores": 50}, {"cores": 70}]
    assert (shares.dominant("a"), memory.dominant("a")) == (70 / 300, 70 / (200 + deployment.core.state.nodes["n"].spec.memory_mb))
    # And a store that is away changes nothing
    deployment.said = None
    deployment.wait(HOUSEKEEPING_S)
    assert shares.dominant("a") == 70 / 300
    # And a shard whose scheduler is gone counts no more
    deployment.said = []
    deployment.wait(HOUSEKEEPING_S)
    assert (shares.dominant("a"), list(shares.active())) == (0.0, [])
