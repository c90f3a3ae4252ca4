"""From what the result store holds to values and errors."""

from __future__ import annotations

import json
import pickle
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram import (
    ActionCancelled,
    ActionError,
    ActionFailed,
    ActionLost,
    ActionRefused,
    ActionRejected,
    ActionTimedOut,
    EnvironmentLost,
    ExecResult,
)
from tangram.action import KINDS
from tangram.blobs import Blobs
from tangram.decode import Meta, decode, read_meta
from tangram.errors import TangramError
from tangram.inbox import Inbox


class NoStore:
    """A store that holds nothing."""

    def get(self, key: str) -> None:
        """Find nothing."""


BLOBS = Blobs(NoStore())  # type: ignore[arg-type]


def failure(kind: object, message: object) -> Meta:
    """Return what Celery stores of a failed task."""
    return Meta(status="FAILURE", result={"exc_type": kind, "exc_message": message, "exc_module": "tangram.errors"})


def outcome(meta: Meta, kind: str = "cpu.exec") -> Any:
    """Return the error an action ends with."""
    with pytest.raises(ActionError) as caught:
        decode(kind, meta, 0.0, BLOBS)
    return caught.value


@pytest.mark.parametrize("error", [ActionFailed, ActionTimedOut, ActionCancelled, ActionRejected, ActionLost])
@pytest.mark.parametrize("message", ["node n1 is lost", ["node n1 is lost"]])
def test_our_errors_come_back_as_themselves(error: type[ActionError], message: object) -> None:
    raised = outcome(failure(error.__name__, message))
    assert type(raised) is error
    assert raised.reason == "node n1 is lost"


@pytest.mark.parametrize(
    ("error", "cause", "own"),
    [
        (ActionFailed("it wrote too much", "disk_limit"), "disk_limit", {}),
        (ActionLost("node n1 is lost", "node_lost"), "node_lost", {}),
        (ActionCancelled("its client is gone", "client_gone"), "client_gone", {}),
        (ActionRefused("there is no image x", "ImageMissing", "image_missing"), "image_missing", {"problem": "ImageMissing"}),
        (EnvironmentLost("its memory was full", "n1", "out_of_memory"), "out_of_memory", {"node": "n1"}),
    ],
)
def test_an_end_comes_back_through_celery_with_its_cause_and_whose_fault_it_was(
    error: ActionError, cause: str, own: dict[str, str]
) -> None:
    for again in (outcome(failure(type(error).__name__, list(error.args))), pickle.loads(pickle.dumps(error))):
        assert (type(again), again.args, again.cause, again.fault) == (type(error), error.args, error.cause, error.fault)
        assert str(again) == again.reason == error.reason
        assert again.cause == cause and {name: getattr(again, name) for name in own} == own
    assert not isinstance(error, ActionRefused) or isinstance(error, ActionFailed)
    assert (error.fault == "program") == (cause in ("disk_limit", "out_of_memory"))


def test_an_end_without_a_cause_has_the_usual_one() -> None:
    found = {
        error.status: (error.cause, error.fault) for error in (ActionFailed("x"), ActionTimedOut("x"), ActionRejected("x"), ActionLost("x"))
    }
    assert found == {
        "failed": ("worker_failed", "infrastructure"),
        "timed_out": ("timeout", "program"),
        "rejected": ("impossible", "caller"),
        "lost": ("node_lost", "infrastructure"),
    }
    assert outcome(failure("EnvironmentLost", ["x", "n1", "a word of a later version"])).cause == "environment_lost"


def test_an_exception_of_a_worker_is_ours_and_one_of_a_task_of_users_is_theirs() -> None:
    ours, theirs = outcome(failure("KeyError", ["x"])), outcome(failure("KeyError", ["x"]), kind="my.task")
    assert (ours.cause, ours.fault, theirs.cause, theirs.fault) == ("worker_failed", "infrastructure", "error", "program")
    nobodys = outcome(failure("NotRegistered", ["my.taks"]), kind="my.taks")
    assert (nobodys.cause, nobodys.fault, "my.taks" in nobodys.reason) == ("impossible", "caller", True)
    # And a worker without one of the system's tasks is of another release
    assert outcome(failure("NotRegistered", ["cpu.exec"])).cause == "worker_failed"


@pytest.mark.parametrize(
    ("meta", "kind", "reason"),
    [
        # A stored name of a class never makes another class.
        (failure("ActionError", "x"), ActionFailed, "ActionError: x"),
        (failure("SystemExit", "x"), ActionFailed, "SystemExit: x"),
        (failure(None, "x"), ActionFailed, ""),
        # Other errors keep their names.
        (failure("ValueError", ["bad"]), ActionFailed, "ValueError: bad"),
        (failure("WorkerLostError", []), ActionFailed, "WorkerLostError"),
        (failure("KeyError", None), ActionFailed, "KeyError"),
        (Meta(status="REVOKED", result={"exc_type": "TaskRevokedError", "exc_message": ["by hand"]}), ActionCancelled, "by hand"),
        (Meta(status="REVOKED", result=None), ActionCancelled, ""),
    ],
)
def test_other_ends_are_failures_with_their_names_or_cancels(meta: Meta, kind: type[ActionError], reason: str) -> None:
    raised = outcome(meta, kind="my.task")
    assert type(raised) is kind
    assert not reason or raised.reason == reason, raised.reason


@pytest.mark.parametrize("status", ["PENDING", "RECEIVED", "STARTED", "RETRY", "PROGRESS"])
def test_only_ends_are_ends(status: str) -> None:
    assert not read_meta(json.dumps({"status": status, "result": None}).encode()).final


def test_the_parts_of_the_time_add_up_to_the_wait() -> None:
    before = time.monotonic()
    submitted = before - 10.0
    value = {"exit_code": 0, "stdout": "", "stderr": ""}
    act = {"queue_s": 2.0, "background_s": 1.0, "execution_s": 5.0, "overhead_s": 99.0}
    result = {"status": "succeeded", "value": value, "dop": 1, "act": act}
    done = decode("cpu.exec", Meta(status="SUCCESS", result=result), submitted, BLOBS)
    assert isinstance(done, ExecResult)
    assert (done.act.queue_s, done.act.background_s, done.act.execution_s) == (2.0, 1.0, 5.0)
    assert before - submitted <= done.act.total_s <= time.monotonic() - submitted


def test_clocks_that_disagree_never_give_negative_overhead() -> None:
    result = {"status": "succeeded", "value": [0.5], "dop": 1, "act": {"queue_s": 2.0, "execution_s": 5.0}}
    assert decode("gpu.score", Meta(status="SUCCESS", result=result), time.monotonic(), BLOBS).act.overhead_s == 0.0


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"exit_code": 0, "stdout": {"$blob": "tangram-blob-1", "bytes": 70000}, "stderr": ""}, "expired"),
        ({"exit_code": "zero"}, "exit_code"),
    ],
    ids=["expired", "unreadable"],
)
def test_a_result_that_cannot_be_read_says_why(value: dict[str, object], word: str) -> None:
    result = {"status": "succeeded", "value": value, "dop": 1, "act": {"queue_s": 0, "execution_s": 0}}
    assert word in outcome(Meta(status="SUCCESS", result=result)).reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(["SUCCESS", "FAILURE", "REVOKED"]) | JSON,
        "result": JSON
        | st.fixed_dictionaries({"exc_type": JSON, "exc_message": JSON})
        | st.fixed_dictionaries({"__type__": st.sampled_from(["datetime", "uuid", "decimal", "bytes", "x"]), "__value__": JSON})
        | st.fixed_dictionaries(
            {
                "status": st.sampled_from(["succeeded", "timed_out"]),
                "value": JSON
                | st.fixed_dictionaries({"exit_code": JSON, "stdout": JSON, "stderr": JSON})
                | st.fixed_dictionaries({"data": JSON | st.fixed_dictionaries({"$blob": JSON})})
                | st.fixed_dictionaries({"dtype": st.just("float32"), "data": JSON, "offsets": JSON}),
                "dop": st.integers(),
                "act": st.fixed_dictionaries({"queue_s": st.floats(), "execution_s": st.floats(0, 9)}),
            }
        ),
    },
)


ALL_KINDS = [*KINDS, "my.task"]


@settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=60) | (JSON | NEARLY).map(lambda value: json.dumps(value).encode()), kind=st.sampled_from(ALL_KINDS))
def test_whatever_is_stored_ends_in_a_value_or_one_of_our_errors(raw: bytes, kind: str) -> None:
    inbox = Inbox(BLOBS)
    future, other = inbox.expect("a", kind), inbox.expect("b", "my.task")
    # When anything at all is said of the first
    ended = inbox.deliver("a", raw)
    # Then it has either ended with a value or an error of ours, or goes on waiting
    if ended:
        error = future.exception(5)
        assert error is None or isinstance(error, TangramError), repr(error)
    else:
        assert inbox.waiting() == ["a", "b"]
    assert inbox.deliver("b", b'{"status": "SUCCESS", "result": 1}')
    assert other.result(0) == 1
    inbox.close()
