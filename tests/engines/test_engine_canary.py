"""Fixed questions: what counts as the same answer, and that an engine which comes back with other weights answers nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.kinds import Kind, engines
from tests.engines.test_engine_life import ask
from workers.gpu.devices import Device
from workers.gpu.engines import canary
from workers.gpu.engines.canary import Answer, Answers
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import CallFailed, EngineFailed, WrongAnswer
from workers.gpu.instances import InstanceName

AT = InstanceName("rm", (0,))


@engines(made=True)
def test_an_engine_that_comes_back_with_other_weights_is_started_from_its_folder_before_anybody_is_served(kind: Kind) -> None:
    host, published = kind.host("logprobs"), list[str]()
    host.listen(lambda status: published.append(status.state))
    with host.serving(*AT) as engine:
        before = ask(engine)
    host.evict(AT)
    kind.spoil()
    with host.serving(*AT) as engine:
        assert ask(engine) == before
    # It is counted as a start and not as a restore
    (status,) = host.status()
    assert (status.state, status.starts, status.restores, status.wrong_answers) == ("resident", 2, 0, 1)
    assert status.to_wire().get("wrong_answers") == 1
    assert published[-4:] == ["host", "restoring", "starting", "resident"]
    host.close()


@engines(moves=True)
def test_a_restore_with_other_weights_fails_and_holds_nothing(kind: Kind) -> None:
    engine = kind.started()
    # Also on a device to which its copy moves
    for device in kind.devices[:2]:
        engine.evict()
        kind.spoil()
        with pytest.raises(WrongAnswer, match=r"rm: restoring failed: fixed question 0 is answered with .*; they may"):
            engine.restore([device])
        assert (engine.state, engine.memory_mb(), engine.host_mb()) == ("failed", 0.0, 0.0)
        engine.start(kind.devices[:1])


@engines(made=True)
def test_an_engine_that_no_longer_answers_has_given_a_wrong_answer(kind: Kind) -> None:
    engine = kind.started()
    engine.evict()
    kind.refuse()
    with pytest.raises(WrongAnswer, match="rm: restoring failed: fixed questions are no longer answered: .*not this one"):
        engine.restore(kind.devices[:1])
    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)


@engines(made=True)
def test_weights_that_answer_no_numbers_are_not_started(kind: Kind) -> None:
    kind.no_numbers()
    engine = kind.make()
    with pytest.raises(EngineFailed, match=r"rm: starting failed: .*(with nan: its weights are of no use|score is .nan)"):
        engine.start(kind.devices[:1])
    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)


@given(st.integers(1, 300_000), st.none() | st.integers(canary.NEW_TOKENS + 1, 100), st.sampled_from([0, canary.NEW_TOKENS]))
def test_every_model_can_read_the_questions_and_continue_them(vocabulary: int, longest: int | None, new_tokens: int) -> None:
    for ids in canary.questions(vocabulary, longest, new_tokens):
        assert ids and all(0 <= token < vocabulary for token in ids)
        assert longest is None or len(ids) + new_tokens <= longest


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_answer_that_is_no_number_is_none(value: float) -> None:
    with pytest.raises(CallFailed, match=f"with {value}: its weights are of no use"):
        canary.must_be_finite((Answer((0.0, value)),))


def refused(before: Answer, now: Answer, most: float) -> str:
    """Return why an answer is refused; empty if it is not."""
    try:
        canary.must_agree((before,), (now,), most)
    except WrongAnswer as error:
        return str(error)
    return ""


def test_without_a_tolerance_the_last_bit_counts() -> None:
    before = Answer((-1.5, -2.0), (4,))
    assert not refused(before, before, 0.0)
    assert "answered with -2, at the start with -1.5" in refused(before, Answer((-2.0, -2.0), (4,)), 0.0)
    assert "they may not differ" in refused(before, Answer((-1.5, math.nextafter(-2.0, 0.0)), (4,)), 0.0)
    assert "continued with [5], at the start with [4]" in refused(before, Answer((-1.5, -2.0), (5,)), 0.0)


@pytest.mark.parametrize("wrong", [1.02, 0.98, math.nan, math.inf])
def test_with_a_tolerance_numbers_may_be_off_by_that_and_no_more(wrong: float) -> None:
    before = Answer((-3.0, 1.0))
    assert not refused(before, Answer((-3.005, 1.005)), 0.01)
    assert "they may differ by 0.01" in refused(before, Answer((-3.0, wrong)), 0.01)


def test_a_continuation_may_turn_off_where_two_tokens_are_almost_equally_likely() -> None:
    # Given the log-prob of a question's only other id, and those of the two ids that continue it
    before = Answer((-9.0, -0.70, -0.1), (4, 5))
    # Then another first id is as good if it was as likely, and what follows it has another context
    assert not refused(before, Answer((-9.0, -0.705, -6.0), (8, 2)), 0.01)
    # But not if it was more or less likely, and not if the context was the same
    assert "answered with -0.9" in refused(before, Answer((-9.0, -0.9, -0.1), (8, 5)), 0.01)
    assert "answered with -0.3" in refused(before, Answer((-9.0, -0.70, -0.3), (4, 5)), 0.01)


def test_the_tolerance_follows_the_dtype_and_the_size_of_the_answers() -> None:
    small, large = (Answer((0.1,)),), (Answer((0.1, -16.0)),)
    assert [canary.tolerance(dtype, small) for dtype in ("float32", "float16", "bfloat16")] == [1e-4, 1 / 256, 1 / 32]
    assert canary.tolerance("bfloat16", large) == 0.5
    assert canary.tolerance("something", small) == canary.tolerance("bfloat16", small)


@engines(computes=False)
def test_a_start_after_a_wrong_answer_must_answer_as_the_start_before(kind: Kind) -> None:
    # Given a device that spoils weights on every way: the restore's, and the start's that follows
    engine, real, spoilt = kind.started(), StubEngine._canary, [True]
    engine.evict()

    def other(engine: StubEngine) -> list[Answers]:
        return [tuple(Answer(tuple(value / 2 for value in one.values)) for one in real(engine)[0])] if spoilt else real(engine)

    kind.patch.setattr(StubEngine, "_canary", other)
    with pytest.raises(WrongAnswer, match="rm: restoring failed"):
        engine.restore(kind.devices[:1])
    # Then no start serves them, however often it is tried
    for _ in range(2):
        with pytest.raises(WrongAnswer, match=r"rm: starting failed: fixed question 0 is answered with .*, at the start with"):
            engine.start(kind.devices[:1])
        assert (engine.state, engine.memory_mb()) == ("failed", 0.0)
    # And one with the right weights does; the next start, of other weights, is compared with nothing
    spoilt.clear()
    engine.start(kind.devices[:1])
    engine.stop()
    spoilt.append(True)
    engine.start(kind.devices[:1])
    assert engine.state == "resident"


@engines(computes=False)
@pytest.mark.parametrize(("while_restoring", "wrong_answers"), [(True, 0), (False, 1)])
def test_if_the_folder_is_gone_too_the_action_fails_and_the_cells_are_free(kind: Kind, while_restoring: bool, wrong_answers: int) -> None:
    host = kind.host("score")
    host.ensure_resident(*AT)
    host.evict(AT)
    # Given other weights, or questions that cannot be computed, which is no wrong answer; and no folder
    kind.spoil()

    def gone(engine: StubEngine, devices: Sequence[Device]) -> None:
        raise OSError(2, "No such file or directory")

    kind.patch.setattr(StubEngine, "_start", gone)
    if while_restoring:
        kind.patch.setattr(StubEngine, "_canary", lambda engine: (_ for _ in ()).throw(MemoryError("out of memory")))
    with pytest.raises(EngineFailed, match="rm: starting failed: .*No such file or directory"):
        host.ensure_resident(*AT)

    (status,) = host.status()
    assert (status.state, status.wrong_answers, status.memory_mb, host.held_mb(0)) == ("failed", wrong_answers, 0.0, 0.0)
