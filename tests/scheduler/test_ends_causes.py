"""Each end of an action has a cause, and the cause says whose fault it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.model import commands, events
from tangram.ends import CAUSES, FAULTS, USUAL, cause_of, fault_of, fault_of_end


def ends(world: Any) -> dict[str, tuple[str, str]]:
    """Return how each action ended so far, and why."""
    return {end.id: (end.status, end.cause) for end in world.of(commands.Finish)}


def test_every_cause_has_a_fault_and_every_end_a_usual_cause() -> None:
    assert {cause.fault for cause in CAUSES.values()} == set(FAULTS) - {""}
    assert set(USUAL) == {"succeeded", "failed", "timed_out", "cancelled", "rejected", "lost"}
    for end, usual in USUAL.items():
        assert cause_of(end, "no such word") == usual
        assert usual == "" or end in CAUSES[usual].ends
    faults = {
        "exit": "program",
        "node_lost": "infrastructure",
        "queue_timeout": "infrastructure",
        "cancelled": "caller",
        "no such word": "",
    }
    assert {cause: fault_of(cause) for cause in faults} == faults


def test_what_a_worker_says_is_the_cause_where_it_is_one(world: Any) -> None:
    w = world().node()
    for number, (status, said) in enumerate((("succeeded", "exit"), ("timed_out", ""), ("failed", "disk_limit"), ("failed", "nonsense"))):
        w.run(f"a{number}")
        w.finish(f"a{number}", status, cause=said)
    assert list(ends(w).values()) == [
        ("succeeded", "exit"),
        ("timed_out", "timeout"),
        ("failed", "disk_limit"),
        ("failed", "worker_failed"),
    ]


def test_a_lost_node_is_the_infrastructures_fault_for_all_that_it_ran_and_held(world: Any) -> None:
    # Given a command that runs, one that waits for it, one that waits for cores, and an action outside of any environment
    w = world().node().open("e")
    w.exec("runs", "e", session="main", idempotent=True)
    w.exec("waits", "e", session="main")
    w.exec("queued", "e", cores=8, preemptible=False)
    w.run("build")
    w.lose()
    w.exec("later", "e")
    found = ends(w)
    assert {id: found[id] for id in ("runs", "waits", "queued", "later")} == dict.fromkeys(
        ("runs", "waits", "queued", "later"), ("lost", "environment_lost")
    )
    assert found["build"] == ("lost", "node_lost") and not w.ends["build"].by_worker
    assert w.ended("waits") == w.ended("queued") == w.ended("later") == ("lost", "environment e is lost: node n0 was lost: it burned")
    assert {w.ends[name].environment_lost_on for name in ("runs", "waits", "queued", "later")} == {"n0"}
    assert w.of(commands.NoteEnvironment)[-1].state == "lost"
    # And a close of what is lost has the same cause, and is nobody's fault
    w.close("e")
    faults = {id: (w.ends[id].cause, fault_of_end(w.ends[id].kind, w.ends[id].cause)) for id in ("runs", "later", "close-e")}
    assert faults == {**dict.fromkeys(("runs", "later"), ("environment_lost", "infrastructure")), "close-e": ("environment_lost", "")}


@pytest.mark.parametrize(
    ("happens", "cause"),
    [
        (lambda w: w.close("e"), "environment_closed"),
        (lambda w: w.handle(events.Cancelled(job="default")), "cancelled"),
        (lambda w: w.handle(events.ClientGone(client="c", reason="its client is gone")), "client_gone"),
    ],
    ids=["closed", "cancelled", "client gone"],
)
def test_who_ends_an_environment_is_the_cause_of_what_ran_and_waited_in_it(world: Any, happens: Callable[[Any], None], cause: str) -> None:
    w = world().node().open("e", client="c")
    w.exec("runs", "e", session="main", client="c")
    w.exec("waits", "e", session="main", client="c")
    # When the environment ends, and the worker says that it has stopped the command
    happens(w)
    (stop,) = w.of(commands.Stop)
    w.finish("runs", "cancelled")
    # Then the node was told why, and both actions say it
    assert stop.cause == cause
    assert (ends(w)["runs"], ends(w)["waits"][1]) == (("cancelled", cause), cause)
    assert fault_of(cause) == "caller"


@pytest.mark.parametrize(
    ("status", "cause"),
    [("failed", "image_missing"), ("failed", "sandbox_failed"), ("timed_out", "open_timeout"), ("timed_out", "queue_timeout")],
)
def test_an_action_on_an_environment_that_could_not_be_opened_has_the_cause_of_that(world: Any, status: str, cause: str) -> None:
    # Given an open that its node reports to have failed, or for which there is no node in time
    w = world()
    if cause != "queue_timeout":
        w.node()
    w.open("e", finish=False, queue_timeout_s=5.0)
    w.exec("parked", "e")
    if cause != "queue_timeout":
        w.finish("open-e", status, cause=cause, reason="no such luck")
    w.tick(6.0)
    w.exec("later", "e")
    assert ends(w) == {"open-e": (status, cause), "parked": ("failed", cause), "later": ("failed", cause)}
    assert w.ended("parked")[1].startswith("environment e is gone: ") and w.ended("parked")[1].endswith(w.ended("open-e")[1])
    assert w.states("e")[-1] == "closed"


def test_an_environment_takes_no_action_of_another_job_and_its_close_is_not_called_off(world: Any) -> None:
    # Given an environment of one job; when another job sends it a command; then that is the caller's mistake
    w = world().node().open("e", job="owner")
    for name, kind in (("runs", "cpu.exec"), ("reads", "cpu.read_file"), ("closes", "cpu.close")):
        w.submit(name, kind, environment="e", job="other")
        assert ends(w)[name] == ("rejected", "bad_input")
        assert w.ended(name)[1] == "environment e is not one of job other"
    # And a close that is under way is not cancelled, which would leave the environment open
    w.close("e")
    w.handle(events.Cancelled(ids=("close-e",), job="owner"))
    assert w.of(commands.Stop) == []
    w.finish("close-e")
    assert ends(w)["close-e"] == ("succeeded", "")


def test_a_program_that_ends_its_environment_is_the_cause_for_all_that_is_lost_with_it(world: Any) -> None:
    # Given a command that runs, and one that waits for it, in an environment that has all the memory
    w = world().node(memory_mb=1).open("e", memory_mb=1).open("next", memory_mb=1)
    w.exec("fills", "e", session="main")
    w.exec("beside", "e", session="other")
    w.exec("waits", "e", session="other")
    # When the first one ends with its environment, and the node's next beat is without that, and knows no better cause
    w.finish("fills", "lost", cause="out_of_memory")
    loss = events.Loss(id="e", reason="its container ended", cause="environment_lost")
    w.handle(events.NodeBeat(name="n0", running=frozenset({"beside"}), environments=frozenset(), lost=(loss,)))
    w.exec("during", "e")
    # Then its room comes back when all that ran in it has ended
    assert "open-next" in w.waiting
    w.finish("beside", "lost", cause="out_of_memory")
    assert "open-next" in w.grants
    w.exec("later", "e")
    # And no action of it is a failure of the infrastructure
    found = ends(w)
    assert {id: found[id] for id in ("fills", "beside", "waits", "during", "later")} == dict.fromkeys(
        ("fills", "beside", "waits", "during", "later"), ("lost", "out_of_memory")
    )
    assert [note.cause for note in w.of(commands.NoteEnvironment) if note.state == "lost"] == ["out_of_memory"]


@pytest.mark.parametrize(
    ("said", "cause", "fault"),
    [
        ("out_of_memory", "out_of_memory", "program"),
        ("environment_lost",) * 2 + ("infrastructure",),
        ("nonsense", "environment_lost", "infrastructure"),
    ],
)
def test_an_environment_that_ends_while_nothing_runs_in_it_is_lost_by_the_cause_that_its_node_names(
    world: Any, said: str, cause: str, fault: str
) -> None:
    # Given an environment in which a command waits for the cores that another one holds
    w = world("fcfs").node(cores=1).open("other")
    w.exec("holds", "other", cores=1)
    w.open("e")
    w.exec("waits", "e", cores=1)
    # When its node says that it has ended, and why
    loss = events.Loss(id="e", reason="its container ended: its memory was full", cause=said)
    said_so = events.NodeBeat(name="n0", running=frozenset({"holds"}), environments=frozenset({"other"}), lost=(loss,))
    w.handle(said_so)
    # Then what waited, and what comes later, has that cause, and the journal, too
    w.exec("late", "e")
    assert (ends(w)["waits"], ends(w)["late"]) == (("lost", cause), ("lost", cause))
    assert fault_of(cause) == fault
    (refused,) = [end for end in w.of(commands.Finish) if end.id == "late"]
    assert "its memory was full" in refused.reason
    w.handle(said_so)
    (noted,) = [note for note in w.of(commands.NoteEnvironment) if note.state == "lost"]
    assert (noted.id, noted.reason, noted.cause) == ("e", loss.reason, cause)
