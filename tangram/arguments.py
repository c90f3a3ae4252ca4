"""Checks of what a trainer gives a call, shared by the calls of `tangram.calls`. Each raises `InvalidAction`, which names the argument."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tangram.errors import InvalidAction

UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""What no shell can be given: NUL, and halves of surrogate pairs, which have no UTF-8 form. Models write both."""


def present(**arguments: Any) -> dict[str, Any]:
    """Leave out what was not given."""
    return {name: value for name, value in arguments.items() if value is not None}


def listed(name: str, values: Iterable[Any]) -> list[Any]:
    """Return a list of the values of whatever can be iterated over, but for texts and mappings."""
    return list(iterable(name, values))


def iterable(name: str, values: Iterable[Any]) -> Iterable[Any]:
    """Return values that can be iterated over and are neither a text nor a mapping."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidAction(name, f"must be a list, not {type(values).__name__}")
    return values


def whole_number(name: str, value: object, most: int) -> int:
    """Return a whole number from 0 to `most`; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InvalidAction(name, f"must be a whole number from 0 to {most}, not {value!r:.40}")
    return value


def process_variables(variables: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return variables for the environment of a process; none where there are none."""
    for name, value in (variables or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name or UNWRITABLE.search(name + value):
            raise InvalidAction("variables", f"must be names and texts, not {name!r}: {value!r}")
    return dict(variables) if variables else None


def request_body(body: bytes | str | None, json_body: Any, headers: dict[str, str]) -> bytes | None:
    """Return the bytes of a request; a JSON body also sets the content type."""
    if json_body is None:
        return body.encode() if isinstance(body, str) else body
    if body is not None:
        raise InvalidAction("body", "give either body or json, not both")
    if not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "application/json"
    try:
        return json.dumps(json_body).encode()
    except (TypeError, ValueError) as error:
        raise InvalidAction("json", str(error)) from None
