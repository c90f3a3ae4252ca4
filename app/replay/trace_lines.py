"""What one line of `tangram.trace/1` may say, declared as models, and how a wrong one is told in one line.

What may live here: checks that a line can pass or fail by itself. What it takes the rest of the trace to know
(is a service in the header, is a name taken) is checked in `app.replay.traces`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError

from app.hosts import HostNames
from scheduler.sim.trace import DEFAULT_PRIORITY, Kind
from tangram.action import DEFAULT_JOB
from tangram.errors import TangramError

SCHEMA = "tangram.trace/1"
_SHOWN_CHARACTERS = 60

Seconds = Annotated[float, Field(ge=0, le=1e9)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]
Amount = Annotated[int, Field(ge=1, le=10**6)]
Megabytes = Annotated[float, Field(ge=0, le=1e9)]
Priority = Annotated[int, Field(ge=0, le=9)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\p{Cc}\p{Zl}\p{Zp}]*$")]
Command = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
UnitsWritten = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,6}$")]


class TraceError(TangramError, ValueError):
    """Raised when a trace, a script or a recording of another project cannot be understood; one line says where."""

    def __init__(self, problem: str, *, key: str = "", file: str = "", line: int | None = None) -> None:
        """Say the `problem` with `key` in `line` of `file`, as far as these are known."""
        place = file if line is None else f"{file}:{line}"
        super().__init__(": ".join(_one_line(part) for part in (place, key, problem) if part))
        self.problem = problem
        self.key = key
        self.file = file
        self.line = line

    def inside(self, key: str) -> TraceError:
        """Give the same error as seen from one level further out."""
        inner = self.key if not self.key or self.key.startswith("[") else f".{self.key}"
        return TraceError(self.problem, key=key + inner, file=self.file, line=self.line)

    def at(self, file: str, line: int | None = None) -> TraceError:
        """Give the same error with its place."""
        return TraceError(self.problem, key=self.key, file=file, line=line)


class AnyLine(BaseModel):
    """Whatever is written as an object: strict about what it knows, and keeping what it does not."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)


class ActionLine(AnyLine):
    """One invocation; see `scheduler.sim.trace.TraceAction`."""

    kind: Kind
    work_s: Seconds
    units: tuple[Amount, ...] = (1,)
    parallel_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    efficiency: dict[UnitsWritten, Annotated[float, Field(gt=0, le=1)]] | None = None
    action_class: Name | None = Field(None, alias="class")
    command: Command | None = None
    service: Name | None = None
    quota: Name | None = None
    tokens: Annotated[int, Field(ge=0, le=10**12)] | None = None
    requires: tuple[Name, ...] = ()
    cpu_s: Seconds | None = None
    observed_s: Seconds | None = None
    timeout_s: PositiveSeconds | None = None
    idempotent: bool | None = None
    preemptible: bool = True
    priority: Priority | None = None
    memory_mb: Megabytes | None = None
    resident_mb: Megabytes | None = None


class StepLine(AnyLine):
    """One step, with either `action` or `actions`."""

    think_s: Seconds = 0.0
    action: ActionLine | None = None
    actions: Annotated[tuple[ActionLine, ...], Field(min_length=1)] | None = None


class TrajectoryLine(AnyLine):
    """A line with a trajectory."""

    schema_: Literal["tangram.trace/1"] = Field(alias="schema")
    trajectory: Name
    steps: Annotated[tuple[StepLine, ...], Field(min_length=1)]
    job: Name = DEFAULT_JOB
    arrival_s: Seconds = 0.0
    priority: Priority = DEFAULT_PRIORITY
    memory_mb: Megabytes | None = None


def _one_or_many(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else value


class ServiceLine(AnyLine):
    """A service in the header; `cells` is an amount or a list of them."""

    cells: Annotated[tuple[Amount, ...], BeforeValidator(_one_or_many)] = (1,)
    memory_mb: Megabytes = 0.0
    restore_s: Seconds = 0.0
    max_concurrency: Amount = 1
    pinned: StrictBool = False
    warm: StrictBool = False


class QuotaLine(AnyLine):
    """A quota in the header."""

    rate_per_s: Annotated[float, Field(gt=0, le=1e9)]
    concurrency: Amount
    burst: Amount | None = None
    tokens_per_min: Annotated[float, Field(gt=0, le=1e12)] | None = None
    account: Name | None = None
    hosts: HostNames | None = None


class HeaderLine(AnyLine):
    """The optional first line."""

    schema_: Literal["tangram.trace/1"] = Field(alias="schema")
    services: dict[Name, ServiceLine] = {}
    quotas: dict[Name, QuotaLine] = {}


Line = TypeVar("Line", bound=AnyLine)


def validated(model: type[Line], text: str | bytes) -> Line:
    """Read `text`, one JSON object, as `model`. Raises `TraceError`, without a place."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise first_problem(error) from None


def extra_of(line: AnyLine) -> Mapping[str, object]:
    """Give the keys of `line` that its model does not know. Raises `TraceError` for numbers that JSON does not know."""
    extra = line.model_extra or {}
    for key, value in extra.items():
        if not _is_json(value):
            raise TraceError("holds a number that JSON does not know (NaN or Infinity)", key=key)
    return extra


def _is_json(value: object) -> bool:
    # The JSON reader takes NaN and 1e999 where no model forbids them, and bounds the depth of what comes here.
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_json(each) for each in value.values())
    if isinstance(value, list):
        return all(_is_json(each) for each in value)
    return True


# Saying what is wrong

_PROBLEMS = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "string_too_long": "is too long",
    "string_pattern_mismatch": "has characters that may not be in it",
}


def first_problem(error: ValidationError) -> TraceError:
    """Turn the first thing that is wrong into an error with its key."""
    first = error.errors(include_url=False)[0]
    path = [part for part in first["loc"] if part != "[key]"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if first["type"] == "json_invalid":
        return TraceError("not JSON: " + first["msg"].removeprefix("Invalid JSON: ").replace(" at line 1 column ", " at column "))
    problem = _PROBLEMS.get(first["type"])
    return TraceError(problem or f"{first['msg'].removeprefix('Input ')}, not {shown(first['input'])}", key=key)


def shown(value: object) -> str:
    """Give `value` as a person may read it in the middle of a line."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**18 else f"a number of {value.bit_length()} bits"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def unreadable(error: Exception, file: str, line: int | None = None) -> TraceError:
    """Say why `file` cannot be read, in the system's words."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return TraceError(f"cannot be read: {reason.lower()}", file=file, line=line)


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds. Raises `TraceError`, which names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TraceError(f"not TOML: {error}", file=str(path)) from None
    except RecursionError:
        raise TraceError("not TOML: nested too deeply", file=str(path)) from None
    except (OSError, ValueError) as error:
        raise unreadable(error, str(path)) from None


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
