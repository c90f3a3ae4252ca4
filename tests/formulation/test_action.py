"""The action formulation: what is refused, by which name, and what survives the way through a message header."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.action import CPU_KINDS, GPU_KINDS, Action, Cost
from tangram.elasticity import shown
from tangram.errors import InvalidAction
from tests.event_log.strategies import actions

HUGE = 10**5000


@given(actions())
def test_an_action_comes_out_of_its_header_and_of_a_pickle_as_it_went_in(action: Action) -> None:
    again = pickle.loads(pickle.dumps(action))
    assert Action.from_header(json.loads(json.dumps(action.to_header()))) == again == action
    assert hash(again) == hash(action)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3)
WORDS = st.sampled_from([10**400, -(10**400), "cpu.exec", "gpu.score", "e1", "cores", "quota:x", "\ud800", "9" * 5000])
GARBAGE = st.recursive(
    PLAIN | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["cores", "cells", "quota:x", "1", "2"]), inner, max_size=4)
        | st.dictionaries(st.integers() | st.none() | st.just(10**400), inner, max_size=2)
    ),
    max_leaves=8,
)
FIELDS = ["kind", "cost", *(field.name for field in fields(Action) if field.name not in ("arguments", "curve"))]
FIELDS += ["parallel_fraction", "efficiency", "submitted_at"]


@given(st.dictionaries(st.sampled_from(FIELDS), GARBAGE, max_size=6))
def test_garbage_in_known_fields_is_refused_as_invalid_action_or_understood(garbage: dict[str, Any]) -> None:
    for header in (garbage, {"kind": "cpu.exec", "environment": "e", **garbage}, {"kind": "build", "cost": {"cores": [1, 2]}, **garbage}):
        try:
            action = Action.from_header(header)
        except InvalidAction as refusal:
            assert str(refusal).isprintable()
            assert len(str(refusal)) < 500
        else:
            assert Action.from_header(json.loads(json.dumps(action.to_header()))) == action
            assert isinstance(hash(action), int)


@given(GARBAGE)
def test_garbage_instead_of_a_header_is_refused(garbage: Any) -> None:
    with pytest.raises(InvalidAction):
        Action.from_header(garbage)


WRONG: dict[str, list[Any]] = {
    "kind": ["", "a\nb"],
    "job": ["\n", "x" * 257],
    "client": ["\n"],
    "detached": [1],
    "trajectory": [[]],
    "environment": ["", {}],
    "session": [0],
    "service": [False],
    "action_class": [()],
    "requires": ["gpu", 3, {"gpu"}, [""], [["a"]], ["gpu"] * 65],
    "work_s": [-1, float("nan"), HUGE],
    "timeout_s": [0, True, float("inf")],
    "queue_timeout_s": ["5"],
    "output_timeout_s": [-0.1],
    "priority": [10, True, 5.0, HUGE],
    "idempotent": [1],
    "curve": [0.9],
    "cost": [{"cores": (1,)}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values], ids=shown)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidAction) as refusal:
        Action(**{"kind": "build", field: value})
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field}: ")


WRONG_CORES: list[Any] = [[], [2, 1], [1, 1], [0], [True], [1.0], [HUGE], {"1": 2}, "4", None, [[1]], [*range(1, 4098)]]
WRONG_COSTS: list[Any] = [{"disk": 1}, {"quota:": 1}, {3: 1}, {"cores": [1, 2], "cells": [1, 2]}, [1], {f"quota:{n}": 1 for n in range(65)}]
WRONG_TOKENS: list[Any] = [{"tokens:llm": 5}, {"quota:llm": 1, "tokens:llm": [5, 6]}]


@pytest.mark.parametrize(
    ("field", "amounts"),
    [
        *(("cost.cores", {"cores": cores}) for cores in WRONG_CORES),
        *(("cost", amounts) for amounts in WRONG_COSTS),
        *(("cost.tokens:llm", amounts) for amounts in WRONG_TOKENS),
    ],
    ids=shown,
)
def test_a_wrong_cost_is_named(field: str, amounts: Any) -> None:
    with pytest.raises(InvalidAction) as refusal:
        Action.from_header({"kind": "build", "cost": amounts})
    assert refusal.value.field == field


@pytest.mark.parametrize("wrong", [{"cores": 4}, {"cores": b"\x01"}, [("cores", (1,))], None])
def test_a_cost_that_is_no_vector_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidAction):
        Cost(wrong)


def test_a_header_without_a_job_belongs_to_the_default_job_and_none_is_empty() -> None:
    assert Action.from_header({"kind": "build"}).job == "default"
    assert Action.from_header(Action(kind="build", job="default").to_header()).job == "default"
    with pytest.raises(InvalidAction, match="job"):
        Action.from_header({"kind": "build", "job": ""})


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"kind": "build", "colour": "red"}, "colour: no such field"),
        ({"kind": "build", "efficiency": 1}, "efficiency: must be an object"),
        ({"kind": "build", "detached": True}, "detached: is only for an environment, when it is opened"),
        *(({"kind": kind}, "environment: ") for kind in CPU_KINDS),
        *(({"kind": kind}, "service: ") for kind in GPU_KINDS),
        *(({"kind": kind, "service": "rm", "environment": "e1"}, "environment: ") for kind in GPU_KINDS),
        ({"kind": "fetch", "environment": "e1", "cost": {"quota:web": 1}}, "cost: "),
        ({"kind": "cpu.open", "environment": "e1", "cost": {"cores": 1, "quota:web": 1}}, "cost: "),
    ],
    ids=shown,
)
def test_fields_that_are_unknown_or_do_not_go_together_are_refused(header: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidAction, match=f"^{problem}"):
        Action.from_header(header)


def test_a_quota_inside_an_environment_goes_with_cores_to_wait_for() -> None:
    assert Action(kind="fetch", environment="e1", cost=Cost({"cores": (1,), "quota:web": (1,)})).cost.quotas == ("web",)


@pytest.mark.parametrize(
    ("amounts", "key"),
    [
        ({}, None),
        ({"memory_mb": 512}, None),
        ({"cores": 2, "memory_mb": 512}, "cores"),
        ({"cells": 1, "cores": [1, 2]}, "cores"),
        ({"memory_mb": [1, 2], "cores": 1}, "memory_mb"),
    ],
)
def test_the_key_resource_is_the_elastic_one_else_the_computing_one(amounts: dict[str, Any], key: str | None) -> None:
    assert Cost.of(**amounts).key == key


def test_a_cost_keeps_its_own_copy() -> None:
    given: dict[str, tuple[int, ...]] = {"cores": (1, 2)}
    cost = Cost(given)
    given["cores"] = (64,)
    assert cost.amounts["cores"] == (1, 2)
    assert cost == Cost.of(cores=[1, 2])
