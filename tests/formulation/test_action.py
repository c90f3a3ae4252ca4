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
from tangram.elasticity import FLAT, LARGEST_AMOUNT, Amdahl, Curve, Table, shown
from tangram.errors import InvalidAction

NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=20)
SECONDS = st.none() | st.floats(0.001, 1e9)
AMOUNTS = st.lists(st.integers(1, LARGEST_AMOUNT), min_size=1, max_size=5, unique=True).map(sorted)
HUGE = 10**5000


@st.composite
def curves(draw: st.DrawFn, units: tuple[int, ...]) -> Curve:
    tables = st.fixed_dictionaries({amount: st.floats(1e-6, 1.0) for amount in units}).map(lambda points: Table(tuple(points.items())))
    return draw(st.just(FLAT) | st.floats(0.0, 1.0).map(Amdahl) | tables)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from([*CPU_KINDS, *GPU_KINDS, "api.call", "build.all"]))
    key = draw(st.sampled_from(["cells"] if kind.startswith("gpu.") else ["cores", "memory_mb"]))
    amounts = tuple(draw(AMOUNTS))
    return Action(
        kind=kind,
        cost=Cost({key: amounts}),
        curve=draw(curves(amounts)),
        job=draw(NAMES),
        trajectory=draw(NAMES | st.just("")),
        environment=draw(NAMES) if kind in CPU_KINDS else None,
        session=draw(st.none() | NAMES),
        service=draw(NAMES) if kind.startswith("gpu.") else None,
        requires=tuple(draw(st.lists(NAMES, max_size=3))),
        work_s=draw(SECONDS),
        timeout_s=draw(SECONDS),
        queue_timeout_s=draw(SECONDS),
        output_timeout_s=draw(SECONDS),
        priority=draw(st.integers(0, 9)),
        idempotent=draw(st.booleans()),
        action_class=draw(st.none() | NAMES),
    )


@given(actions())
def test_an_action_comes_out_of_its_header_as_it_went_in(action: Action) -> None:
    header = json.loads(json.dumps(action.to_header()))

    assert Action.from_header(header) == action


@given(actions())
def test_an_action_can_be_hashed_and_pickled(action: Action) -> None:
    again = pickle.loads(pickle.dumps(action))

    assert again == action
    assert hash(again) == hash(action)


GARBAGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.just(-(10**400))
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from(["cpu.exec", "gpu.score", "e1", "cores", "quota:x", "\ud800", "9" * 5000]),
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", ""),
        ("kind", "a\nb"),
        ("job", "\n"),
        ("client", "\n"),
        ("detached", 1),
        ("job", "x" * 257),
        ("trajectory", []),
        ("environment", ""),
        ("environment", {}),
        ("session", 0),
        ("service", False),
        ("action_class", ()),
        ("requires", "gpu"),
        ("requires", 3),
        ("requires", {"gpu"}),
        ("requires", [""]),
        ("requires", [["a"]]),
        ("work_s", -1),
        ("work_s", float("nan")),
        ("work_s", HUGE),
        ("timeout_s", 0),
        ("timeout_s", True),
        ("timeout_s", float("inf")),
        ("queue_timeout_s", "5"),
        ("output_timeout_s", -0.1),
        ("priority", 10),
        ("priority", True),
        ("priority", 5.0),
        ("priority", HUGE),
        ("idempotent", 1),
        ("curve", 0.9),
        ("cost", {"cores": (1,)}),
    ],
    ids=shown,
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    given = {"kind": "build", field: value}

    with pytest.raises(InvalidAction) as refusal:
        Action(**given)

    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "amounts"),
    [
        ("cost.cores", {"cores": []}),
        ("cost.cores", {"cores": [2, 1]}),
        ("cost.cores", {"cores": [1, 1]}),
        ("cost.cores", {"cores": [0]}),
        ("cost.cores", {"cores": [True]}),
        ("cost.cores", {"cores": [1.0]}),
        ("cost.cores", {"cores": [HUGE]}),
        ("cost.cores", {"cores": {"1": 2}}),
        ("cost.cores", {"cores": "4"}),
        ("cost.cores", {"cores": None}),
        ("cost.cores", {"cores": [[1]]}),
        ("cost", {"disk": 1}),
        ("cost", {"quota:": 1}),
        ("cost", {3: 1}),
        ("cost", {"cores": [1, 2], "cells": [1, 2]}),
        ("cost", [1]),
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


def test_an_unknown_field_of_a_header_is_named() -> None:
    with pytest.raises(InvalidAction, match="^colour: no such field"):
        Action.from_header({"kind": "build", "colour": "red"})


def test_a_header_without_a_job_belongs_to_the_default_job_and_none_is_empty() -> None:
    assert Action.from_header({"kind": "build"}).job == "default"
    assert Action.from_header(Action(kind="build", job="default").to_header()).job == "default"
    with pytest.raises(InvalidAction, match="job"):
        Action.from_header({"kind": "build", "job": ""})


def test_only_environments_are_detached() -> None:
    with pytest.raises(InvalidAction, match="detached: is only for an environment, when it is opened"):
        Action(kind="build", detached=True)


@pytest.mark.parametrize("kind", CPU_KINDS)
def test_sandbox_actions_need_an_environment(kind: str) -> None:
    with pytest.raises(InvalidAction, match="^environment: "):
        Action(kind=kind)


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_model_actions_need_a_service_and_have_no_environment(kind: str) -> None:
    with pytest.raises(InvalidAction, match="^service: "):
        Action(kind=kind)
    with pytest.raises(InvalidAction, match="^environment: "):
        Action(kind=kind, service="rm", environment="e1")


def test_a_quota_inside_an_environment_needs_cores_to_wait_for() -> None:
    with pytest.raises(InvalidAction, match="^cost: "):
        Action(kind="fetch", environment="e1", cost=Cost({"quota:web": (1,)}))
    with pytest.raises(InvalidAction, match="^cost: "):
        Action(kind="cpu.open", environment="e1", cost=Cost({"cores": (1,), "quota:web": (1,)}))

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
