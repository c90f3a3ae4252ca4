"""Any event, command or line of a log: drawn field by field from the types that they declare."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tangram.action import CPU_KINDS, GPU_KINDS, Action, Cost
from tangram.elasticity import FLAT, Amdahl, Flat, Table

NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=8)
SECONDS = st.none() | st.floats(0.001, 1e9)
AMOUNTS = st.sets(st.integers(1, 64), min_size=1, max_size=4).map(lambda amounts: tuple(sorted(amounts)))
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    int: st.integers(),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    object: st.integers() | st.text(max_size=8),
}


@st.composite
def actions(draw: st.DrawFn) -> Action:
    """Draw an action of an environment, a service or a quota, with all that may be said of it."""
    units = draw(AMOUNTS)
    efficiencies = st.tuples(*(st.tuples(st.just(amount), st.floats(0.01, 1)) for amount in units))
    curve = draw(st.just(FLAT) | st.builds(Amdahl, st.floats(0, 1)) | st.builds(Table, efficiencies))
    place = draw(
        st.sampled_from(
            [
                {"kind": draw(st.sampled_from(CPU_KINDS)), "environment": "e", "session": "main", "cost": Cost.of(cores=units)},
                {"kind": draw(st.sampled_from(GPU_KINDS)), "service": "rm", "cost": Cost.of(cells=units, memory_mb=5)},
                {"kind": "some.task", "requires": ("big", "new"), "cost": Cost({"cores": units, "quota:search": (2,)})},
            ]
        )
    )
    words = {
        "job": NAMES,
        "trajectory": NAMES,
        "work_s": st.none() | st.floats(0, 1e9),
        "timeout_s": SECONDS,
        "queue_timeout_s": SECONDS,
        "output_timeout_s": SECONDS,
        "priority": st.integers(0, 9),
        "idempotent": st.booleans(),
        "action_class": st.none() | NAMES,
    }
    return Action(curve=curve, **place, **{name: draw(values) for name, values in words.items()})


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Action:
        return actions()
    if hint == (Flat | Amdahl | Table):
        return actions().map(lambda action: action.curve)
    if hint in PLAIN:
        return PLAIN[hint]
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return st.deferred(lambda: st.builds(hint, **{field.name: any_of(hints[field.name]) for field in fields(hint)}))
    if origin is Annotated:
        return any_of(inner[0]).filter(lambda value: _may_be(TypeAdapter(hint), value))
    if origin is types.UnionType or origin is Union:
        return st.one_of(*(st.none() if one is type(None) else any_of(one) for one in inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is Mapping:
        return st.dictionaries(any_of(inner[0]), any_of(inner[1]), max_size=2)
    values = any_of(inner[0])
    return st.frozensets(values, max_size=3) if origin is frozenset else st.lists(values, max_size=3).map(tuple)


def _may_be(adapter: TypeAdapter[Any], value: object) -> bool:
    """Return whether a type lets a value be."""
    try:
        adapter.validate_python(value)
        return True
    except ValidationError:
        return False
