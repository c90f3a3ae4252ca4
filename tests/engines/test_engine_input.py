"""What engines refuse to read: it is named by its place, in one line, and nothing is computed."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.arrays import pack_ints
from tests.engines.kinds import CPUS, Kind, engines
from workers.gpu.call_control import CallControl
from workers.gpu.engines.abstract import Task
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import BadInput, NotSupported

ITEM = {"prompt": "p", "response": "r"}


def resident(task: Task = "score") -> StubEngine:
    """Return an engine that reads whatever any engine may be asked."""
    engine = StubEngine("stub", task, 100.0)
    engine.start(CPUS[:1])
    return engine


@engines(computes=True)
def test_what_the_model_cannot_read_is_refused_by_index(kind: Kind) -> None:
    judge, teacher, longest = kind.shared("score"), kind.shared("logprobs"), kind.can.longest
    with pytest.raises(BadInput, match=r"sequences\[1\]: token id 512 is outside the vocabulary of 512"):
        teacher.logprobs([[1, 2], [3, 512]])
    with pytest.raises(BadInput, match=rf"sequences\[1\]: {longest + 1} tokens, the model reads at most {longest}"):
        teacher.logprobs([[1, 2], [1] * (longest + 1)])
    with pytest.raises(BadInput, match=r"items\[1\]: \d+ tokens, the model reads at most 512"):
        judge.score([ITEM, {"prompt": "0 1 " * 400, "response": "x"}])
    with pytest.raises(BadInput, match=r"prompts\[1\]: has no tokens"):
        teacher.generate(["a", ""])
    with pytest.raises(BadInput, match=r"prompts\[0\]: 1 tokens and 512 to come, the model reads at most 512"):
        teacher.generate(["a"], max_tokens=512)
    assert len(teacher.logprobs([[1] * longest])[0]) == longest - 1


@engines(computes=True)
def test_an_engine_that_computes_takes_no_pretended_time(kind: Kind) -> None:
    with pytest.raises(NotSupported, match="work_s"):
        kind.shared("score").score([ITEM], CallControl(work_s=1.0))


@engines(transformers=True, made=True)
def test_a_conversation_without_a_chat_template_is_refused(kind: Kind, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kind.models / "rm-small", tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match=r"items\[1\]: the model has no chat template"):
        kind.started(model=folder).score([ITEM, {"prompt": [{"role": "user", "content": "hi"}], "response": "x"}])


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ("text", r"items\[1\]: "),
        ({"prompt": "p"}, r"items\[1\]\.response: Field required"),
        ({"prompt": "p", "response": 5}, r"items\[1\]\.response"),
        ({"prompt": "p", "response": "r", "weight": 1}, r"items\[1\]\.weight"),
        ({"prompt": "p", "response": [{"role": "assistant", "content": "r"}]}, r"items\[1\]: a response of messages needs"),
        ({"prompt": [{"role": "user"}], "response": "r"}, r"items\[1\]\.prompt.*content: Field required"),
        ({"prompt": [{"role": "user", "content": "\udfff"}], "response": "x"}, r"items\[1\]\.prompt.*half of a surrogate pair"),
        ({"prompt": "a", "response": "\ud800"}, r"items\[1\]\.response.*half of a surrogate pair"),
    ],
)
def test_a_wrong_item_is_named(item: object, place: str) -> None:
    with pytest.raises(BadInput, match=place):
        resident().score([ITEM, item])


@pytest.mark.parametrize(
    ("ids", "place"),
    [
        ([], r"sequences\[1\]: List should have at least 1 item"),
        ([1, -1], r"sequences\[1\]\[1\]"),
        ([1, True], r"sequences\[1\]\[1\]"),
        ([1, 2.0], r"sequences\[1\]\[1\]"),
        ("12", r"sequences\[1\]"),
    ],
)
def test_a_wrong_sequence_is_named(ids: object, place: str) -> None:
    with pytest.raises(BadInput, match=place):
        resident("logprobs").logprobs([[1], ids])


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"seed": -1}, "sampling.seed"),
        ({"prompts": ["a\ud800"]}, r"prompts\[0\]: is no text: character 1 is half of a surrogate pair"),
    ],
)
def test_a_wrong_prompt_and_wrong_sampling_are_named(words: dict[str, object], place: str) -> None:
    with pytest.raises(BadInput, match=place):
        resident("logprobs").generate(**{"prompts": ["a"], **words})  # type: ignore[arg-type]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "response", "role", "content", "x"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(anything)
def test_any_input_is_answered_or_refused_in_one_line(value: object) -> None:
    scorer, teacher = resident(), resident("logprobs")
    for ask in (scorer.score, teacher.logprobs, teacher.generate):
        try:
            answers = ask(value)  # type: ignore[arg-type]
        except BadInput as error:
            assert len(str(error).splitlines()) <= 1
        else:
            assert isinstance(value, list) and len(answers) == len(value)


def test_packed_ids_are_read_as_lists_are() -> None:
    engine = resident("logprobs")
    negative = {"dtype": "int32", "data": base64.b64encode(struct.pack("<3i", 1, 2, -3)).decode(), "offsets": [0, 1, 3]}
    assert engine.logprobs(json.loads(json.dumps(pack_ints([[1, 2, 3], [7]])))) == engine.logprobs([[1, 2, 3], [7]])
    assert engine.logprobs(pack_ints([])) == []
    with pytest.raises(BadInput, match=r"sequences\[1\]: List should have at least 1 item"):
        engine.logprobs(pack_ints([[1], []]))
    with pytest.raises(BadInput, match=r"sequences\[1\]\[1\]: Input should be greater than or equal to 0"):
        engine.logprobs(negative)
    with pytest.raises(BadInput, match=r"sequences\.offsets: must rise from 0 to 3"):
        engine.logprobs({**negative, "offsets": [0, 2]})


@pytest.mark.parametrize("work_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_time_that_is_none_is_refused(work_s: float) -> None:
    with pytest.raises(BadInput, match="work_s"):
        CallControl(work_s=work_s)
