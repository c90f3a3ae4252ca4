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


def test_the_loss_of_an_environment_comes_back_with_its_node() -> None:
    raised = outcome(failure("EnvironmentLost", ["environment e is lost: it burned", "n1"]))
    assert type(raised) is EnvironmentLost
    assert (str(raised), raised.reason, raised.node) == ("environment e is lost: it burned", "environment e is lost: it burned", "n1")
    assert pickle.loads(pickle.dumps(raised)).args == raised.args


def test_a_refusal_comes_back_with_its_problem_and_is_a_failure_too() -> None:
    raised = outcome(failure("ActionRefused", ["there is no file x", "NoSuchFile"]))
    assert isinstance(raised, ActionRefused) and isinstance(raised, ActionFailed)
    assert (str(raised), raised.reason, raised.problem) == ("there is no file x", "there is no file x", "NoSuchFile")
    assert pickle.loads(pickle.dumps(raised)).args == raised.args


def test_the_cause_of_an_end_comes_back_through_celery_and_says_whose_fault_it_was() -> None:
    for error in (
        ActionFailed("it wrote too much", "disk_limit"),
        ActionLost("node n1 is lost", "node_lost"),
        ActionCancelled("its client is gone", "client_gone"),
        ActionRefused("there is no image x", "ImageMissing", "image_missing"),
        EnvironmentLost("its memory was full", "n1", "out_of_memory"),
    ):
        stored = outcome(failure(type(error).__name__, list(error.args)))
        for again in (stored, pickle.loads(pickle.dumps(error))):
            assert (type(again), again.args, again.cause, again.fault) == (type(error), error.args, error.cause, error.fault)
            assert str(again) == error.reason
    assert (error.cause, error.fault, error.node) == ("out_of_memory", "program", "n1")


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


@pytest.mark.parametrize(
    ("kind", "message", "reason"),
    [("ValueError", ["bad"], "ValueError: bad"), ("WorkerLostError", [], "WorkerLostError"), ("KeyError", None, "KeyError")],
)
def test_other_errors_keep_their_name(kind: str, message: object, reason: str) -> None:
    raised = outcome(failure(kind, message), kind="my.task")
    assert type(raised) is ActionFailed
    assert raised.reason == reason


def test_a_stored_class_name_never_makes_another_class() -> None:
    assert type(outcome(failure("ActionError", "x"))) is ActionFailed
    assert type(outcome(failure("SystemExit", "x"))) is ActionFailed
    assert type(outcome(failure(None, "x"))) is ActionFailed


def test_revoked_is_cancelled() -> None:
    assert outcome(Meta(status="REVOKED", result={"exc_type": "TaskRevokedError", "exc_message": ["by hand"]})).reason == "by hand"
    assert type(outcome(Meta(status="REVOKED", result=None))) is ActionCancelled


@pytest.mark.parametrize("status", ["PENDING", "RECEIVED", "STARTED", "RETRY", "PROGRESS"])
def test_only_ends_are_ends(status: str) -> None:
    assert not read_meta(json.dumps({"status": status, "result": None}).encode()).final


def test_the_parts_of_the_time_add_up_to_the_wait() -> None:
    before = time.monotonic()
    submitted = before - 10.0
    value = {"exit_code": 0, "stdout": "", "stderr": ""}
    result = {"status": "succeeded", "value": value, "dop": 1, "act": {"queue_s": 2.0, "execution_s": 5.0, "overhead_s": 99.0}}
    done = decode("cpu.exec", Meta(status="SUCCESS", result=result), submitted, BLOBS)
    assert isinstance(done, ExecResult)
    assert (done.act.queue_s, done.act.execution_s) == (2.0, 5.0)
    assert before - submitted <= done.act.total_s <= time.monotonic() - submitted


def test_clocks_that_disagree_never_give_negative_overhead() -> None:
    result = {"status": "succeeded", "value": [0.5], "dop": 1, "act": {"queue_s": 2.0, "execution_s": 5.0}}
    assert decode("gpu.score", Meta(status="SUCCESS", result=result), time.monotonic(), BLOBS).act.overhead_s == 0.0


def test_a_result_that_has_expired_says_so() -> None:
    value = {"exit_code": 0, "stdout": {"$blob": "tangram-blob-1", "bytes": 70000}, "stderr": ""}
    result = {"status": "succeeded", "value": value, "dop": 1, "act": {"queue_s": 0, "execution_s": 0}}
    assert "expired" in outcome(Meta(status="SUCCESS", result=result)).reason


def test_an_unreadable_result_names_the_field() -> None:
    result = {"status": "succeeded", "value": {"exit_code": "zero"}, "dop": 1, "act": {"queue_s": 0, "execution_s": 0}}
    assert "exit_code" in outcome(Meta(status="SUCCESS", result=result)).reason


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
    # Given one action that waits, and another
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
    # And the other still gets its result
    assert inbox.deliver("b", b'{"status": "SUCCESS", "result": 1}')
    assert other.result(0) == 1
    inbox.close()
