"""The event log: what a core was made of, every event that it took in, and what it answered, as lines of JSON.

Since the core knows nothing but its events, the lines of a log, taken to a core made alike, lead to the same commands
again (`Replay`). Only values and their words live here; the file itself is in `app/event_log.py`.

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
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from scheduler.core.core import Core
from scheduler.learning.durations import Observation
from scheduler.model import Limits, QuotaSpec, ServiceSpec
from scheduler.model.commands import Command
from scheduler.model.events import Event
from scheduler.policies import make_policy
from tangram.action import Action
from tangram.elasticity import Amdahl, Curve, Flat, Table, make_curve, shown
from tangram.errors import TangramError

SCHEMA: Final = "tangram.events/3"

T = TypeVar("T")


class BrokenLog(TangramError, ValueError):
    """Raised when a line of an event log makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a core is made of."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A scheduler begins."""

    epoch: int
    setup: Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """An event, when it was taken in, and what followed from it."""

    epoch: int
    at: float
    event: Event
    commands: tuple[Command, ...]


Line = Opening | Handled


class EventLog(Protocol):
    """Where the live scheduler writes down what happens to its core."""

    def handled(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Note an event and what followed from it."""

    def flush(self) -> None:
        """Have all that was noted written."""


class Replay:
    """Takes the lines of a log to cores of its own. `equal` counts the events that led to the commands of the log."""

    def __init__(self) -> None:
        self._cores: dict[int, Core] = {}
        self.equal = 0

    def take(self, line: Line) -> tuple[Command, ...] | None:
        """Repeat what a line says; return the commands that follow from its event where they are not those of the log.

        Raises
        ------
        BrokenLog
            When the line belongs to a scheduler of which the log has no beginning.

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
    words = {"schema": SCHEMA, **encode(line)} if isinstance(line, Opening) else encode(line)
    return json.dumps(words, separators=(",", ":"))


def decode_line(text: str) -> Line:
    """Return what a line of the log says.

    Raises
    ------
    BrokenLog
        When it cannot be understood.

    """
    try:
        words = json.loads(text)
        if not isinstance(words, dict):
            raise BrokenLog("it is no object")
        if "schema" in words and words.pop("schema") != SCHEMA:
            raise BrokenLog(f"its schema is not {SCHEMA}")
        kind: type[Line] = Opening if "setup" in words else Handled
        return decode(kind, words)
    except json.JSONDecodeError as error:
        raise BrokenLog(f"it is not JSON: {error}") from None


def encode(value: object) -> Any:
    """Return a value of the core as JSON has it."""
    match value:
        case Action():
            return value.to_header()
        case Flat():
            return {}
        case Amdahl():
            return {"parallel_fraction": value.parallel_fraction}
        case Table():
            return {"efficiency": {str(units): efficiency for units, efficiency in value.efficiency}}
        case frozenset():
            return sorted(value)
        case tuple():
            return [encode(one) for one in value]
        case Mapping():
            return dict(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    words: dict[str, Any] = {"type": type(value).__name__} if type(value).__name__ in _TYPED else {}
    for declared in fields(value):
        field_value = getattr(value, declared.name)
        if field_value != _default(declared):
            words[declared.name] = encode(field_value)
    return words


def decode(kind: type[T], words: object) -> T:
    """Return the value of class `kind` that `encode` has put into these words.

    Raises
    ------
    BrokenLog
        When it has put no such value into them.

    """
    if not isinstance(words, dict):
        raise BrokenLog(f"{shown(words)} is no {kind.__name__}")
    named: Any = kind
    hints = _hints(named)
    for name in words:
        if name not in hints:
            raise BrokenLog(f"{kind.__name__} has no {shown(name)}")
    try:
        return kind(**{name: _decode(hints[name], value) for name, value in words.items()})
    except BrokenLog:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise BrokenLog(str(error)) from None


_TYPED: Final[dict[str, type]] = {kind.__name__: kind for kind in get_args(Event) + get_args(Command)}
_NUMBERS: Final[dict[Any, tuple[type, ...]]] = {float: (int, float), int: (int,)}


def _default(declared: Field[Any]) -> object:
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(hint: Any, value: Any) -> Any:
    """Return `value` as the type of a field has it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Action:
        return Action.from_header(value)
    if hint == Curve:
        return make_curve(**value)
    if hint in (Event, Command):
        return _decode_typed(inner, value)
    if is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, value)
    if origin is types.UnionType:
        return None if value is None else _decode(inner[0], value)
    if origin in (tuple, frozenset) and isinstance(value, list):
        return origin(_decode(inner[0], one) for one in value)
    if hint in _NUMBERS:
        fits = isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    elif origin is Literal:
        fits = value in inner
    else:
        fits = isinstance(value, origin or hint)
    if not fits:
        raise BrokenLog(f"{shown(value)} is no {getattr(hint, '__name__', hint)}")
    return value


def _decode_typed(kinds: tuple[type, ...], words: object) -> Any:
    given = dict(words) if isinstance(words, dict) else {}
    kind = _TYPED.get(str(given.pop("type", None)))
    if kind not in kinds:
        raise BrokenLog(f"{shown(words)} is none of {', '.join(one.__name__ for one in kinds)}")
    return decode(kind, given)
