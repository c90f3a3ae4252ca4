"""How engines start, leave their devices, come back and fail: nothing is held that is not needed, and every failure says why."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.lifecycle import SERVICE
from tests.engines.fixtures import changed
from tests.engines.kinds import CPUS, MODELS, Kind, Task, engines
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import CallFailed, EngineFailed, NotResident, WrongState

ITEMS = [{"prompt": "What is 2 + 3?", "response": "5"}, {"prompt": "p", "response": "a longer response than the other"}]
SEQUENCES = [[5, 17, 33], list(range(100, 180)), [9, 9]]


def ask(engine: Engine) -> tuple[list[float], list[str]]:
    """Ask a service questions of its own kind."""
    if engine.task == "score":
        return engine.score(ITEMS), []
    return list(chain.from_iterable(engine.logprobs(SEQUENCES))), engine.generate(["What is"], 5)


def must_refuse(engine: Engine, state: str) -> None:
    """Check that an engine is in a state in which it takes no calls."""
    assert engine.state == state
    with pytest.raises(NotResident, match=f"is {state}"):
        ask(engine)


@engines()
@pytest.mark.parametrize("task", ["score", "logprobs"])
def test_an_evicted_engine_holds_no_more_than_it_must_and_comes_back_with_the_same_answers(kind: Kind, task: Task) -> None:
    engine = kind.shared(task)
    before, held_mb, servers = ask(engine), engine.memory_mb(), kind.servers()
    assert held_mb > kind.can.keeps_mb
    for _ in range(2):
        engine.evict()
        must_refuse(engine, "host")
        assert engine.memory_mb() == kind.can.keeps_mb
        assert kind.can.moves or engine.host_mb() > 1.0
        engine.restore(kind.devices[:1])
        numbers, texts = ask(engine)
        assert texts == before[1] and numbers == (before[0] if kind.can.made else pytest.approx(before[0], abs=kind.can.close))
        assert (engine.state, kind.servers()) == ("resident", servers)
        assert engine.memory_mb() == pytest.approx(held_mb, rel=0.0 if kind.can.made else 0.5)


@engines(made=True)
def test_an_engine_that_is_stopped_is_as_one_that_was_never_started(kind: Kind) -> None:
    engine = kind.make()
    must_refuse(engine, "absent")
    engine.start(kind.devices[:1])
    before, files = ask(engine), sorted((kind.folder / "state").glob("*"))
    for change in (engine.start, engine.restore):
        with pytest.raises(WrongState):
            change(kind.devices[:1])
    engine.evict()
    with pytest.raises(WrongState):
        engine.evict()
    assert sorted((kind.folder / "state").glob("*")) == files == []
    engine.stop()
    engine.stop()
    must_refuse(engine, "absent")
    assert (engine.memory_mb(), engine.host_mb()) == (0.0, 0.0)
    engine.start(kind.devices[:1])
    assert ask(engine) == before


@engines(moves=True)
def test_an_engine_comes_back_on_more_devices_and_on_fewer(kind: Kind) -> None:
    engine = kind.started("logprobs")
    (before,), one_mb = engine.logprobs([SEQUENCES[1]]), engine.memory_mb()
    for devices in (CPUS, CPUS[1:], CPUS[2:]):
        engine.evict()
        assert engine.can_restore(devices)
        engine.restore(devices)
        assert engine.held_mb() == [pytest.approx(one_mb)] * len(devices)
        # The devices share a batch
        assert engine.logprobs([SEQUENCES[1]] * 5) == [pytest.approx(before, abs=kind.can.close)] * 5


@engines(made=True)
def test_an_engine_that_holds_more_than_it_may_fails_to_start(kind: Kind) -> None:
    engine = kind.make()
    with pytest.raises(EngineFailed, match=r"it holds [58]00?0\.0 MiB on a device and may hold 0\.1|alone take 0\.4 MiB.*room for 0\.1"):
        engine.start(kind.devices[:2], most_mb=0.1)
    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)


def with_code(folder: Path) -> None:
    """Have a model bring its own code, which leaves a trace."""
    changed(folder, model_type="mine", auto_map={"AutoConfig": "code.C", "AutoModelForSequenceClassification": "code.M"})
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


def without_head(folder: Path) -> None:
    """Take the weights of the scoring head away."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BROKEN: dict[str, tuple[Task, Callable[[Path], object], str]] = {
    "none": ("score", shutil.rmtree, "does not exist|cannot be loaded"),
    "empty": ("score", lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no JSON": ("score", lambda folder: (folder / "config.json").write_text("{"), "cannot be (loaded|read)"),
    "a list": ("score", lambda folder: (folder / "config.json").write_text("[]"), "cannot be (loaded|read)"),
    "no keys": ("score", lambda folder: (folder / "config.json").write_text("{}"), "cannot be (loaded|read)"),
    "unknown": ("score", lambda folder: changed(folder, model_type="nobody-knows"), "cannot be (loaded|read)"),
    "no tokenizer": ("score", lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be (loaded|read)"),
    "no tensors": ("score", lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot be loaded|SafetensorError"),
    "damaged": ("score", lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100), "cannot be loaded|SafetensorError"),
    "own code": ("score", with_code, "cannot be (loaded|read)"),
    "two labels": ("score", lambda folder: changed(folder, id2label={"0": "a", "1": "b"}), "has 2 labels: a reward model has one"),
    "no head": ("score", without_head, "no fitting weights for score.weight|has no weights of a head that scores"),
    "a judge": (
        "logprobs",
        lambda folder: shutil.copytree(folder.with_name("rm-small"), folder, dirs_exist_ok=True),
        "no fitting weights for lm_head.weight|Classification: it is no model for task 'logprobs'",
    ),
    "a teacher": (
        "score",
        lambda folder: shutil.copytree(folder.with_name("teacher-0"), folder, dirs_exist_ok=True),
        "no fitting weights for score.weight|Qwen2ForCausalLM: it is no model for task 'score'",
    ),
}


@engines(computes=True, made=True)
@pytest.mark.parametrize("what", BROKEN)
def test_a_folder_that_is_no_fitting_model_is_refused_in_one_line_and_may_be_mended(kind: Kind, what: str, tmp_path: Path) -> None:
    task, damage, words = BROKEN[what]
    (tmp_path / "models").mkdir()
    for name in MODELS.values():
        shutil.copytree(kind.models / name, tmp_path / "models" / name)
    folder = tmp_path / "models" / MODELS[task]
    damage(folder)
    engine = kind.make(task, model=folder)

    with pytest.raises(EngineFailed, match=words) as caught:
        engine.start(kind.devices[:1])

    assert str(caught.value).startswith("rm: starting failed: ") and len(str(caught.value).splitlines()) == 1
    assert engine.failure in str(caught.value)
    assert (engine.state, engine.memory_mb(), kind.servers(), (folder / "ran").exists()) == ("failed", 0.0, [], False)
    with pytest.raises(NotResident, match="rm is failed, not resident"):
        ask(engine)
    if what == "empty":
        shutil.copy(kind.models / MODELS[task] / "config.json", folder)
        engine.start(kind.devices[:1])
        assert (engine.state, engine.failure) == ("resident", "")


@engines(computes=True, made=True)
def test_a_chat_template_that_cannot_be_read_is_named(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=rf"chat_template: {tmp_path}/none cannot be read"):
        kind.started(chat_template=tmp_path / "none")


class Breaking(StubEngine):
    """Fails to start as often as a test asks, and to compute always."""

    failures = 1

    def _start(self, devices: Sequence[Device]) -> None:
        super()._start(devices)
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("no kernel image\nis available")

    def _score(self, items: object, control: object) -> list[float]:
        raise ZeroDivisionError("oops")


def test_a_start_or_a_call_that_breaks_is_one_line_and_costs_nothing() -> None:
    engine = Breaking("breaking", "score", 100.0)
    with pytest.raises(EngineFailed, match="breaking: starting failed: RuntimeError: no kernel image is available"):
        engine.start(CPUS[:1])
    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)
    with pytest.raises(NotResident, match="no kernel image"):
        engine.score(ITEMS)
    engine.start(CPUS[:1])
    assert (engine.state, engine.failure) == ("resident", "")
    with pytest.raises(CallFailed, match="breaking: ZeroDivisionError: oops"):
        engine.score(ITEMS)
    assert (engine.state, engine.running) == ("resident", 0)


def test_a_stop_that_breaks_is_one_line_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an engine off its devices that cannot let go of what it holds
    engine = StubEngine("rm", "score", 100)
    engine.start(CPUS[:1])
    engine.evict()
    monkeypatch.setattr(engine, "_free", Mock(side_effect=TimeoutError("the driver does not answer")))
    # When it is stopped, twice
    for _ in range(2):
        with pytest.raises(EngineFailed, match="rm: stopping failed: TimeoutError: the driver does not answer"):
            engine.stop()
    # Then it says so, until it can
    assert engine.state == "failed" and "the driver does not answer" in engine.failure
    monkeypatch.undo()
    engine.stop()
    assert engine.state == "absent"


@given(st.lists(st.sampled_from(["start", "evict", "restore", "stop"]), max_size=12))
def test_changes_follow_the_table_and_memory_is_held_when_resident_only(changes: list[str]) -> None:
    engine = StubEngine("stub", "score", 100.0)
    after = {"start": "resident", "evict": "host", "restore": "resident", "stop": "absent"}
    via = {"start": "starting", "evict": "evicting", "restore": "restoring"}
    for change in changes:
        before = engine.state
        allowed = change == "stop" or via[change] in SERVICE.after(before)
        try:
            getattr(engine, change)(*([CPUS[:1]] if change in ("start", "restore") else []))
        except WrongState:
            assert not allowed and engine.state == before
        else:
            assert allowed and engine.state == after[change]
        assert engine.memory_mb() == (100.0 if engine.state == "resident" else 0.0)
