"""The simulation itself: it is exact, it finds a planted defect, and it says how to see it again."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from app.event_log import main
from scheduler.core import nodes
from scheduler.core.memory import STEP_MB, Memory
from scheduler.core.memory_books import Book, NodeMemory
from scheduler.core.nodes import may_run_elsewhere
from scheduler.live import heartbeats
from scheduler.live.command_executor import CommandExecutor
from scheduler.model import state
from scheduler.model.state import State
from tangram import session
from tangram.life_signs import SIGN_S
from tests.virtual.clock import EPOCH
from tests.virtual.run import broken_laws, running
from tests.virtual.scenario import Fault, Scenario, scenario
from tests.virtual.shrink import law_of, shortest
from tests.virtual.trainer import Rollout, Step
from workers.node import Node

COUNT = State.count
ROOT = Path(__file__).parents[2]
COMMAND = {"work_s": 5.0, "parallel": 0.0, "exit": 0, "print": 7, "units": (1,)}
SPREAD_S = SIGN_S + 1.0
"""When clients know what shards carry."""
ROLLOUT = Rollout("t0", "a", 0.0, (Step(0.0, "open"), Step(0.1, "exec", (COMMAND,)), Step(0.0, "close")))


def story(one: Scenario) -> list[Any]:
    with running(one) as run:
        broken = run.go()
        return [
            broken,
            run.log,
            run.world.now,
            [(told.action, told.status, told.told_at) for trainer in run.trainers for told in trainer.told],
        ]


def test_a_seed_is_one_story() -> None:
    for seed in (3, 85):
        assert story(scenario(seed)) == story(scenario(seed))


def steps(*more: Step, **command: Any) -> tuple[Step, ...]:
    """Return steps with a command a moment after the opening, and more before the close."""
    return (Step(0.0, "open"), Step(0.1, "exec", ({**COMMAND, **command},)), *more, Step(0.0, "close"))


def later(pause_s: float) -> Rollout:
    """Return another rollout, whose command comes so long after its opening."""
    return replace(ROLLOUT, name="t1", steps=(Step(0.0, "open"), Step(pause_s, "exec", (COMMAND,)), Step(0.0, "close")))


TWICE = replace(ROLLOUT, steps=steps(Step(0.0, "exec", (COMMAND,))))
LONG = replace(ROLLOUT, name="t1", steps=steps(work_s=50.0))


@pytest.mark.parametrize(
    ("rollouts", "faults"),
    [
        ([ROLLOUT], []),
        ([ROLLOUT, later(8.0)], [Fault(3.5, "restart node", lasts_s=2.0)]),
        ([TWICE, later(3.0)], [Fault(2.5, "replace node", lasts_s=12.0)]),
        ([ROLLOUT, LONG], [Fault(2.5, "replace node", lasts_s=14.0)]),
        ([ROLLOUT], [Fault(3.0, "freeze node", lasts_s=6.0, amount=-1.0)]),
        ([ROLLOUT], [Fault(3.0, "cut node", lasts_s=6.0, amount=-1.0)]),
        ([ROLLOUT], [Fault(0.0, "submissions lost", lasts_s=3.0)]),
        ([ROLLOUT], [Fault(2.0, "broker away", lasts_s=20.0)]),
    ],
    ids=[
        "no fault",
        "environments and what runs in them outlive their worker",
        "a worker that hands over loses nothing that ends in time",
        "a worker that hands over leaves what runs for long to the next one",
        "a node is silent while it stands still",
        "a node is silent while it is cut off",
        "a client asks again for what the broker has lost without a broken connection",
        "the broker is away for longer than three beats",
    ],
)
def test_nothing_is_lost(rollouts: list[Rollout], faults: list[Fault]) -> None:
    broken, log, _, told = story(Scenario(1, (2,), tuple(rollouts), tuple(faults)))
    assert broken == [], log
    assert [status for _, status, _ in told] == ["succeeded"] * sum(len(rollout.steps) for rollout in rollouts)


def test_environments_open_elsewhere_while_a_node_can_open_none() -> None:
    rollouts = tuple(replace(ROLLOUT, name=f"t{number}", begins_s=float(number)) for number in range(6))
    broken, log, _, told = story(Scenario(1, (4, 2), rollouts, (Fault(0.0, "sicken node", lasts_s=20.0),)))
    assert broken == [] and [status for _, status, _ in told] == ["succeeded"] * 18, log


def test_the_cancel_of_a_job_that_the_broker_lost_is_sent_again() -> None:
    runs = replace(ROLLOUT, steps=(Step(0.0, "open"), Step(0.1, "exec", ({**COMMAND, "work_s": 200.0},))))
    cancels = replace(ROLLOUT, name="t1", begins_s=7.0, steps=(Step(0.0, "cancel job"),))
    faults = (Fault(6.0, "kill scheduler", amount=1.0), Fault(8.0, "broker comes back empty"))
    broken, log, _, told = story(Scenario(1, (2,), (runs, cancels), faults))
    assert broken == [], log
    assert [status for _, status, _ in told][:2] == ["succeeded", "cancelled"]


def test_a_scheduler_may_die_at_each_of_its_calls() -> None:
    for call in range(1, 40):
        broken, log, _, told = story(Scenario(call, (2,), (ROLLOUT,), (Fault(0.02, "kill scheduler", 0, amount=call),)))
        assert broken == [], log
        assert [status for _, status, _ in told] == ["succeeded"] * 3


@pytest.mark.parametrize("amount", [-1.0, 1.0], ids=["refused", "silent"])
def test_a_leader_that_does_not_reach_the_broker_leaves_the_lease_to_one_that_does(amount: float) -> None:
    broken, log, _, told = story(Scenario(1, (2,), (ROLLOUT,), (Fault(2.0, "cut scheduler", lasts_s=300.0, amount=amount),)))
    assert broken == [] and [status for _, status, _ in told] == ["succeeded"] * 3
    assert max(told_at for _, _, told_at in told) < 1040.0, "a second after which the other one leads, and not the end of the fault"
    assert [line.split()[1:3] for line in log if "leads" in line] == [["scheduler", "1"], ["scheduler", "0"]], log


def test_a_standby_whose_clock_is_ahead_by_a_whole_lease_takes_it_only_when_its_holder_is_gone() -> None:
    faults = (Fault(3.0, "clock steps", 0, amount=5.0), Fault(12.0, "kill scheduler", 0, amount=1.0))
    broken, log, _, _ = story(Scenario(1, (2,), (ROLLOUT, later(20.0)), faults))
    assert broken == []
    # Then it leads for the first time when the other one has been killed, and at once: the lease has run out by its clock
    led = [(line.split()[2], float(line.split()[0])) for line in log if "leads" in line]
    assert [name for name, _ in led] == ["1", "0"] and 12.0 < led[1][1] < 15.0, log


def test_a_leader_whose_clock_is_set_back_goes_on_to_lead() -> None:
    """Given schedulers with nothing to do, when first the clock of one is behind and then that of the other, then the same one leads on."""
    steps = ((3.0, 0, -20.0), (11.0, 0, 20.0), (11.0, 1, -20.0))
    faults = tuple(Fault(at_s, "clock steps", number, amount=amount) for at_s, number, amount in steps)
    broken, log, _, _ = story(Scenario(1, (2,), (later(20.0),), faults))
    assert broken == []
    assert sum("leads" in line for line in log) == 1, log


def test_while_no_scheduler_of_a_shard_runs_the_others_go_on() -> None:
    """Given environments on three shards, when both schedulers of one stand still, then what is there waits, and all else goes on."""
    rollouts = tuple(replace(later(6.0), name=f"t{number}", begins_s=SPREAD_S) for number in range(3))
    faults = tuple(Fault(SPREAD_S + 3.0, "freeze scheduler", target, lasts_s=40.0, amount=-1.0) for target in (1, 4))
    with running(Scenario(1, (1, 1, 1), rollouts, faults, shards=3)) as run:
        assert run.go() == [], run.log
        ended = run.database.execute("select shard, kind, status, ended_at - ? from actions", (EPOCH,)).fetchall()
    assert Counter((shard, kind, status) for shard, kind, status, _ in ended) == Counter(
        (shard, kind, "succeeded") for shard in range(3) for kind in ("cpu.open", "cpu.exec", "cpu.close")
    )
    closed_at = {shard: at for shard, kind, _, at in ended if kind == "cpu.close"}
    assert closed_at[1] > SPREAD_S + 43.0 > max(closed_at[0], closed_at[2]) + 20.0


def test_a_client_that_sends_all_to_the_first_shard_is_found() -> None:
    rollouts = tuple(replace(ROLLOUT, name=f"t{number}", begins_s=SPREAD_S) for number in range(3))
    with patch.object(session, "shard_of_action", lambda *_: 0):
        broken = broken_laws(Scenario(1, (1, 1, 1), rollouts, (), shards=3))
    assert "each action is in one shard" in map(law_of, broken)


def test_the_event_log_of_schedulers_that_die_replays_to_the_same_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given schedulers that keep a log of elastic commands, when one dies, then the log replays, and has no word of what commands were."""
    log = tmp_path / "events.jsonl"
    elastic = tuple({**COMMAND, "parallel": 0.9, "print": 271_828, "units": (1, 2)} for _ in range(3))
    rollout = replace(ROLLOUT, steps=(Step(0.0, "open"), Step(0.1, "exec", elastic), Step(0.0, "close")))
    with running(Scenario(1, (3,), (rollout,), (Fault(4.0, "kill scheduler", amount=3),)), log) as run:
        assert run.go() == []
    said = log.read_text()
    setups = [line["setup"] for line in map(json.loads, said.splitlines()) if "setup" in line]
    assert [len(setup.get("history", ())) for setup in setups] == [0, 1], "the next scheduler learns from what has ended, here an open"
    assert said.count("tangram.events/4") == 2 and '"type":"Resize"' in said and "271828" not in said
    assert main([str(log)]) == 0
    assert capsys.readouterr().out.endswith(" decisions, all equal\n")


def test_a_planted_defect_is_found_and_made_short() -> None:
    """Given nodes that claim nothing, when messages come twice, then a command runs twice, and a short schedule shows it."""
    faults = (Fault(0.01, "messages doubled", lasts_s=9.0, amount=0.3), Fault(0.3, "slow network", lasts_s=1.0))
    rollouts = (replace(ROLLOUT, name="t0"), replace(ROLLOUT, name="t1"))
    with patch.object(Node, "_may_claim", lambda *_: True), patch.object(Node, "_claim_in_store", lambda *_: True):
        short, why = shortest(Scenario(2, (2,), rollouts, faults), broken_laws)
    assert law_of(why[0]) == "nothing runs twice"
    assert [fault.kind for fault in short.faults] == ["messages doubled"]
    assert sum(len(rollout.steps) for rollout in short.rollouts) < 6


def test_a_seed_shows_that_environments_grow_beyond_what_is_free() -> None:
    def grow(memory: Memory, of_node: NodeMemory, book: Book) -> bool:
        memory._allow(of_node, book, min(book.environment.memory_mb, book.allowance_mb + STEP_MB))
        return True

    with patch.object(Memory, "_grow", grow):
        broken = broken_laws(scenario(226))

    assert [law_of(law) for law in broken[:1]] == ["what environments may use is there"]


def elastic(cores: int, *faults: Fault) -> Scenario:
    """Return a command on two cores that goes down to one when another one comes, and grows again."""
    grows = {**COMMAND, "work_s": 40.0, "parallel": 0.9, "units": (1, 2)}
    rollout = replace(ROLLOUT, steps=(Step(0.0, "open"), Step(0.1, "exec", (grows,)), Step(0.0, "close")))
    return Scenario(1, (cores,), (rollout, replace(later(4.0), job="b")), faults)


@pytest.mark.parametrize(
    ("of", "name", "instead", "law"),
    [
        (CommandExecutor, "_unit_s", lambda *_: 0.0, "accounts are right"),
        (state, "granted_amounts", lambda action: tuple(3 * amount for amount in action.units), "a grant is one of the amounts"),
        (State, "count", lambda self, running, sign: COUNT(self, running, max(0, sign)), "nothing is left anywhere"),
    ],
    ids=["a next scheduler does not know what was held", "a core that grants what was not asked for", "a share that stays"],
)
def test_a_defect_in_what_the_books_say_is_found(of: object, name: str, instead: object, law: str) -> None:
    one = elastic(4 if of is state else 2, Fault(15.0, "kill scheduler", amount=1.0))
    assert broken_laws(one) == []
    with patch.object(of, name, instead):
        assert law in map(law_of, broken_laws(one))


def test_an_open_on_a_draining_node_is_found() -> None:
    one = Scenario(1, (2,), (replace(ROLLOUT, begins_s=5.0),), (), drains=((0, 1.0, 30.0),))
    assert broken_laws(one) == []
    with patch.object(state.Node, "takes_new", property(lambda self: not self.silent)):
        assert [law_of(law) for law in broken_laws(one)] == ["nothing begins on a draining node"]


def test_the_api_sees_a_request_whose_place_was_given_again_too_early() -> None:
    """Given an API that takes two requests, and has them, when one of two nodes is cut off for a while, then its request goes out once."""
    request = {"work_s": 12.0, "idempotent": True, "answers": (200,)}
    rollout = Rollout("c0", "a", 0.0, (Step(0.0, "call", (request, request)),))
    one = Scenario(1, (1,), (rollout,), (Fault(3.0, "cut node", 1, lasts_s=7.0, amount=5.0),), apis=2)
    assert broken_laws(one) == []
    with patch.object(heartbeats, "may_leave", may_run_elsewhere), patch.object(nodes, "may_leave", may_run_elsewhere):
        assert [law_of(law) for law in broken_laws(one)] == ["no quota is exceeded"]


def test_the_page_on_what_holds_names_the_laws() -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("## What holds when things break")[2].partition("\n## ")[0]
    rows = re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", page)
    named = {law.strip() for row in rows for law in " ".join(row.lower().rstrip(".").split()).split(";")}
    assert named == set(re.findall(r'f"([a-z ]{8,}): ', (ROOT / "tests/virtual/laws.py").read_text()))
