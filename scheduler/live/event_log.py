"""The event log: the setup of a core, every event and its commands, as lines of JSON.

The core knows nothing but its events. So the lines of a log lead to the same commands again in a core with the same setup
(`Replay`). Only values and their encoding live here; the file itself is in `app/event_log.py`.

| line | holds |
|---|---|
| opening | `schema`, `epoch`, `setup`: policy, limits, services, quotas, history |
| handled | `epoch`, `at`, `event`, `commands` |

Every scheduler that takes over opens anew, under the epoch of its lease. Events and commands are objects with their
class as `type` and their fields under their own names, less those at their default; sets are sorted lists, actions
are as in the header `tangram`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Protocol, get_args

from pydantic import ConfigDict, GetCoreSchemaHandler, SerializerFunctionWrapHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from scheduler.core.core import Core
from scheduler.learning.durations import Observation
from scheduler.model import Limits, QuotaSpec, ServiceSpec
from scheduler.model.commands import Command
from scheduler.model.events import Event
from scheduler.policies import make_policy
from tangram.errors import TangramError, first_problem

SCHEMA: Final = "tangram.events/4"

_CONFIG: Final = ConfigDict(extra="forbid")


class BrokenLog(TangramError, ValueError):
    """Raised when a line of an event log cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup of a core."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    policy: str
    depth: int = 16
    without: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    services: tuple[ServiceSpec, ...] = ()
    quotas: tuple[QuotaSpec, ...] = ()
    history: tuple[Observation, ...] = ()

    def core(self) -> Core:
        """Make the core. Raises `UnknownPolicy`."""
        policy = make_policy(self.policy, depth=self.depth, without=self.without)
        return Core(policy, limits=self.limits, services=self.services, quotas=self.quotas, history=self.history)


class _ByName:
    """Annotates a union of classes: an instance is written as an object with the name of its class as `type`."""

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        named = core_schema.wrap_serializer_function_ser_schema(_with_type)
        choices: dict[Hashable, CoreSchema] = {
            kind.__name__: core_schema.no_info_before_validator_function(_without_type, handler.generate_schema(kind), serialization=named)
            for kind in get_args(union)
        }
        return core_schema.tagged_union_schema(choices, discriminator=_type_of)


def _type_of(value: object) -> str | None:
    return value.get("type") if isinstance(value, dict) else type(value).__name__


def _without_type(words: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in words.items() if name != "type"}


def _with_type(value: object, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
    return {"type": type(value).__name__, **write(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A scheduler begins."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    epoch: int
    setup: Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """An event, its time, and the commands that followed."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    epoch: int
    at: float
    event: Annotated[Event, _ByName()]
    commands: tuple[Annotated[Command, _ByName()], ...]


Line = Opening | Handled


class EventLog(Protocol):
    """The live scheduler's log of its core's events."""

    def handled(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Note an event and its commands."""

    def flush(self) -> None:
        """Write all noted lines."""


class Replay:
    """Takes the lines of a log to its own cores. `equal` counts the events that led to the commands of the log."""

    def __init__(self) -> None:
        self._cores: dict[int, Core] = {}
        self.equal = 0

    def take(self, line: Line) -> tuple[Command, ...] | None:
        """Repeat a line; return the commands of its event if they differ from the log's.

        Raises `BrokenLog` when the log has no opening of the line's scheduler.
        """
        if isinstance(line, Opening):
            self._cores[line.epoch] = line.setup.core()
            return None
        core = self._cores.get(line.epoch)
        if core is None:
            raise BrokenLog(f"the log has no opening of epoch {line.epoch}")
        out = tuple(core.handle(line.event, line.at))
        if out != line.commands:
            return out
        self.equal += 1
        return None


def encode_line(line: Line) -> str:
    """Return a line of the log, without its end."""
    words = _adapter(type(line)).dump_python(line, exclude_defaults=True)  # type: ignore[arg-type]
    return _json({"schema": SCHEMA, **words} if isinstance(line, Opening) else words)


def encode_commands(commands: Sequence[Command]) -> str:
    """Return commands in the format of the log."""
    return _json(_adapter(_COMMANDS).dump_python(tuple(commands), exclude_defaults=True))


def decode_line(text: str) -> Line:
    """Return the value of a line of the log. Raises `BrokenLog` when it cannot be understood."""
    try:
        words = json.loads(text)
        if not isinstance(words, dict):
            raise BrokenLog("it is no object")
        if "schema" in words and words.pop("schema") != SCHEMA:
            raise BrokenLog(f"its schema is not {SCHEMA}")
        line: Line = _adapter(Opening if "setup" in words else Handled).validate_python(words)
        return line
    except json.JSONDecodeError as error:
        raise BrokenLog(f"it is not JSON: {error}") from None
    except ValidationError as error:
        raise BrokenLog(first_problem(error)) from None


def _json(words: object) -> str:
    text = json.dumps(words, separators=(",", ":"), default=sorted)  # sets are the only values without a form in JSON
    if "\\ud" not in text:
        return text
    # A program may have printed lone surrogates. They are not valid text, and no reader accepts them.
    clean = json.dumps(words, default=sorted, ensure_ascii=False).encode("utf-8", "replace")
    return json.dumps(json.loads(clean), separators=(",", ":"))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what reads and writes values of a kind. It is made at its first use, since most schedulers keep no log."""
    return TypeAdapter(kind)


_COMMANDS: Final = tuple[Annotated[Command, _ByName()], ...]
