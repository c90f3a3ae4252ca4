"""The unified action formulation: what one action is, what it costs, how it may be treated.

An action has a cost vector over kinds of resource. A dimension may name a set of acceptable amounts instead of
one; at most one dimension, the *key elastic resource*, changes how long the action runs (the paper, section
"Unified action formulation"). Everything is checked at construction, with errors that name the field, so that a
wrong action never leaves the trainer. The same words, as JSON, travel in the message header `tangram`
(`Action.to_header`, `Action.from_header`); arguments travel in the Celery message itself.

Only values live here: no connection, no clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, TypeGuard

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from tangram.arguments import truth
from tangram.elasticity import FLAT, MOST_AMOUNTS, Amdahl, Curve, Elasticity, Flat, Table, check_units, curve_words, make_curve, shown
from tangram.errors import InvalidAction

CORES = "cores"
CELLS = "cells"
MEMORY_MB = "memory_mb"
QUOTA_PREFIX = "quota:"
TOKENS_PREFIX = "tokens:"

CPU_KINDS = ("cpu.open", "cpu.exec", "cpu.read_file", "cpu.write_file", "cpu.request", "cpu.snapshot", "cpu.close_session", "cpu.close")
GPU_KINDS = ("gpu.score", "gpu.logprobs", "gpu.generate")
API_KINDS = ("api.call",)
KINDS = CPU_KINDS + GPU_KINDS + API_KINDS
"""The kinds that come with the system. Any other Celery task that declares its resources is an action too."""

MOST_RESOURCES, MOST_LABELS = 64, 64
"""Most resources in a cost vector, and most node labels that an action may require."""

LONGEST_S: Final = 1e9
"""Longest time an action may name, in seconds: some thirty years."""

DEFAULT_JOB: Final = "default"
"""The job of messages that name none."""

DEFAULT_PRIORITY, HIGHEST_PRIORITY = 5, 9

ELASTIC: Final = "elastic"
FIXED: Final = "fixed"
"""How the memory of an environment is granted: as it is used, or all of its limit from the beginning."""

Amounts = int | Iterable[int]


@dataclass(frozen=True, slots=True)
class Cost:
    """A cost vector: for each kind of resource the acceptable amounts, ascending.

    Names are `cores`, `cells` (GPU cells), `memory_mb`, `quota:<name>` (requests against that quota) and
    `tokens:<name>` (tokens that these requests are expected to cost there).
    """

    amounts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    quotas: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The names of the quotas that this cost draws on."""

    def __post_init__(self) -> None:
        """Refuse unknown resources, wrong amounts and more than one elastic dimension."""
        clean: dict[str, tuple[int, ...]] = {}
        if not isinstance(self.amounts, Mapping):
            raise InvalidAction("cost", f"must be an object, not {shown(self.amounts)}")
        if len(self.amounts) > MOST_RESOURCES:
            raise InvalidAction("cost", f"names more than {MOST_RESOURCES} resources")
        for name in sorted(self.amounts, key=shown):
            if not _is_resource(name):
                raise InvalidAction("cost", f"unknown resource {shown(name)}: use cores, cells, memory_mb, quota:<name> or tokens:<name>")
            check_units(self.amounts[name], f"cost.{name}")
            clean[name] = tuple(self.amounts[name])
        for name in clean:
            if name.startswith(TOKENS_PREFIX) and (QUOTA_PREFIX + name.removeprefix(TOKENS_PREFIX) not in clean or len(clean[name]) > 1):
                raise InvalidAction(f"cost.{name}", "must be one amount, beside requests against the same quota")
        elastic = [name for name, amounts in clean.items() if len(amounts) > 1]
        if len(elastic) > 1:
            raise InvalidAction("cost", f"at most one resource may name several amounts, not {' and '.join(elastic)}")
        object.__setattr__(self, "amounts", MappingProxyType(clean))
        object.__setattr__(self, "quotas", tuple(name.removeprefix(QUOTA_PREFIX) for name in clean if name.startswith(QUOTA_PREFIX)))

    @classmethod
    def of(cls, **amounts: Amounts) -> Cost:
        """Build a cost from keywords, e.g. `Cost.of(cores=[1, 2, 4], memory_mb=512)`."""
        return cls({name: _amounts(name, given) for name, given in amounts.items()})

    @property
    def key(self) -> str | None:
        """The key elastic resource: the dimension with several amounts, else the compute dimension, else none."""
        for name, amounts in self.amounts.items():
            if len(amounts) > 1:
                return name
        for name in (CORES, CELLS):
            if name in self.amounts:
                return name
        return None

    def least(self, name: str) -> int:
        """Return the smallest acceptable amount of `name`; 0 where the vector has no such dimension."""
        amounts = self.amounts.get(name)
        return amounts[0] if amounts else 0

    def tokens(self, quota: str) -> int:
        """Return the tokens that the requests against a quota are expected to cost."""
        return self.least(TOKENS_PREFIX + quota)

    def __hash__(self) -> int:
        return hash(tuple(self.amounts.items()))

    def __reduce__(self) -> tuple[type[Cost], tuple[dict[str, tuple[int, ...]]]]:
        """Pickle as a plain mapping."""
        return (Cost, (dict(self.amounts),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One invocation of an outside resource; the unit that is scheduled.

    `kind` is the Celery task's name and `arguments` its keywords. `work_s` is the expected duration on one unit
    (`T_ori`), absent where nobody knows. `timeout_s` counts from the start of execution, `queue_timeout_s` from
    submission; `output_timeout_s` is the longest silence allowed. Higher `priority` (0..9) goes first. An
    `idempotent` action may be run again after its node was lost, unless it belongs to an environment, which is lost with its node.
    One that is not `preemptible` keeps its cores once it has them: for timing runs, and for programs with clocks of their own.
    `action_class` groups alike actions for learning.

    One that names no `job` belongs to that of the client that sends it, or to `DEFAULT_JOB`. `client` is the id of that client, which
    fills it in. When a client gives no sign of life any more, its actions are cancelled and its environments closed. Environments
    that are `detached` stay until their lease is over. An open may name that: `lease_s` seconds after it stands the environment is closed,
    in use or not. `owner` says for people whose environment it is. Its memory is `elastic`, granted as it is used, or `fixed`, kept for it
    from the beginning.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)
    cost: Cost = field(default_factory=Cost)
    curve: Curve = FLAT
    job: str = ""
    trajectory: str = ""
    environment: str | None = None
    session: str | None = None
    service: str | None = None
    requires: tuple[str, ...] = ()
    work_s: float | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    output_timeout_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    idempotent: bool = False
    preemptible: bool = True
    action_class: str | None = None
    client: str = ""
    detached: bool = False
    lease_s: float | None = None
    owner: str = ""
    memory: str = ELASTIC

    def __post_init__(self) -> None:
        """Refuse wrong fields, naming the field."""
        check_name("kind", self.kind)
        if not isinstance(self.arguments, Mapping):
            raise InvalidAction("arguments", f"must be keywords of the task, not {shown(self.arguments)}")
        for name in ("job", "trajectory", "client", "owner"):
            if getattr(self, name) != "":
                check_name(name, getattr(self, name))
        for name in ("environment", "session", "service", "action_class"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        for name in ("timeout_s", "queue_timeout_s", "output_timeout_s", "lease_s"):
            _check_seconds(name, getattr(self, name), above_zero=True)
        _check_seconds("work_s", self.work_s, above_zero=False)
        if not isinstance(self.priority, int) or isinstance(self.priority, bool) or not 0 <= self.priority <= HIGHEST_PRIORITY:
            raise InvalidAction("priority", f"must be a whole number from 0 to {HIGHEST_PRIORITY}, not {shown(self.priority)}")
        for name in ("idempotent", "preemptible", "detached"):
            truth(name, getattr(self, name))
        if not isinstance(self.requires, (list, tuple)):
            raise InvalidAction("requires", f"must be a list of node labels, not {shown(self.requires)}")
        if len(self.requires) > MOST_LABELS:
            raise InvalidAction("requires", f"names more than {MOST_LABELS} labels")
        if self.memory not in (ELASTIC, FIXED):
            raise InvalidAction("memory", f"must be {ELASTIC} or {FIXED}, not {shown(self.memory)}")
        for label in self.requires:
            check_name("requires", label)
        object.__setattr__(self, "requires", tuple(self.requires))
        if not isinstance(self.cost, Cost):
            raise InvalidAction("cost", f"must be a Cost, not {shown(self.cost)}")
        if not isinstance(self.curve, (Flat, Amdahl, Table)):
            raise InvalidAction("curve", f"must be Flat, Amdahl or Table, not {shown(self.curve)}")
        self._check_place()
        _ = self.elasticity

    def _check_place(self) -> None:
        """Refuse what contradicts where the action runs: on cells of a service, or in an environment, or anywhere."""
        for name in ("detached", "lease_s", "owner", "memory"):
            if getattr(self, name) != _DEFAULTS[name] and self.kind != "cpu.open":
                raise InvalidAction(name, "is only for an environment, when it is opened")
        on_cells = self.kind.startswith("gpu.") or CELLS in self.cost.amounts
        if self.kind.startswith("gpu.") and self.service is None:
            raise InvalidAction("service", f"{self.kind} needs the name of a service")
        if self.environment is None:
            if self.kind in CPU_KINDS:
                raise InvalidAction("environment", f"{self.kind} needs an environment")
        elif on_cells:
            raise InvalidAction("environment", "an action on GPU cells runs in no environment")
        elif self.cost.quotas and (CORES not in self.cost.amounts or self.kind in ("cpu.open", "cpu.close")):
            raise InvalidAction("cost", "in an environment, only actions on its cores can draw on a quota")

    @property
    def units(self) -> tuple[int, ...]:
        """The acceptable amounts of the key elastic resource."""
        key = self.cost.key
        return self.cost.amounts[key] if key else (1,)

    @property
    def elasticity(self) -> Elasticity:
        """The amounts of the key elastic resource and the curve over them."""
        return Elasticity(units=self.units, curve=self.curve)

    def to_header(self) -> dict[str, Any]:
        """Return the JSON-able header; fields at their default are left out, arguments are not in it."""
        header: dict[str, Any] = {"kind": self.kind, "cost": {name: list(amounts) for name, amounts in self.cost.amounts.items()}}
        header.update(curve_words(self.curve))
        for name in _PLAIN:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                header[name] = list(value) if isinstance(value, tuple) else value
        return header

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Action:
        """Build the action that a header describes.

        Raises `InvalidAction` when a field is unknown or wrong; nothing in a header is trusted.
        """
        if not isinstance(header, Mapping):
            raise InvalidAction("tangram", f"the header must be an object, not {type(header).__name__}")
        unknown = sorted(shown(name).strip("'") for name in header if name not in _HEADER_FIELDS)
        if unknown:
            raise InvalidAction(unknown[0], "no such field of an action")
        cost = header.get("cost", {})
        if not isinstance(cost, Mapping):
            raise InvalidAction("cost", f"must be an object, not {type(cost).__name__}")
        plain = {"job": DEFAULT_JOB, **{name: header[name] for name in _PLAIN if name in header}}
        check_name("job", plain["job"])
        return cls(
            kind=header.get("kind", ""),
            cost=Cost({name: _amounts(name, given) for name, given in cost.items()}),
            curve=make_curve(header.get("parallel_fraction"), header.get("efficiency")),
            **plain,
        )

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Let a model hold an action as its header."""
        write = core_schema.plain_serializer_function_ser_schema(cls.to_header)
        return core_schema.no_info_plain_validator_function(cls.from_header, serialization=write)

    def with_arguments(self, **arguments: Any) -> Action:
        """Return a copy with these keyword arguments for its task."""
        return replace(self, arguments=arguments)


_PLAIN = tuple(f.name for f in fields(Action) if f.name not in ("kind", "arguments", "cost", "curve"))
_DEFAULTS = {f.name: f.default for f in fields(Action)}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PLAIN_NAME = re.compile(r"[\w.+-]+", re.ASCII)
_LONGEST_CLASS = 64
_HEADER_FIELDS = {*_PLAIN, "kind", "cost", "parallel_fraction", "efficiency", "submitted_at", "blobs"}


def command_class(command: str) -> str:
    """Name the class of a shell command: its first word without the folder, `shell` if that is no plain name.

    Assignments in front (`CI=1 pytest`) do not count as the word.
    """
    words = [word for word in command.split() if not _ASSIGNMENT.match(word)]
    name = _PLAIN_NAME.search(words[0].rstrip("/").rpartition("/")[2]) if words else None
    return name.group()[:_LONGEST_CLASS] if name else "shell"


def _is_resource(name: object) -> bool:
    if not isinstance(name, str) or len(name) > 256 or not name.isprintable():
        return False
    return name in (CORES, CELLS, MEMORY_MB) or (
        name.startswith((QUOTA_PREFIX, TOKENS_PREFIX)) and name not in (QUOTA_PREFIX, TOKENS_PREFIX)
    )


def _amounts(name: object, given: object) -> tuple[int, ...]:
    if isinstance(given, int):
        return (given,)
    if isinstance(given, (str, bytes, Mapping, Set)) or not isinstance(given, Iterable):
        raise InvalidAction(f"cost.{name}" if _is_resource(name) else "cost", f"must be an amount or a list of amounts, not {shown(given)}")
    return tuple(islice(given, MOST_AMOUNTS + 1))


def is_name(value: object) -> TypeGuard[str]:
    """Say whether a value is a name: 1 to 256 printable characters, which a column of the journal holds."""
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


def check_name(name: str, value: object) -> None:
    """Raise `InvalidAction` where the value of the field `name` is no name."""
    if not is_name(value):
        raise InvalidAction(name, f"must be 1 to 256 printable characters, not {shown(value)}")


def _check_seconds(name: str, value: object, *, above_zero: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidAction(name, f"must be a number of seconds, not {shown(value)}")
    if not 0 <= value <= LONGEST_S or (above_zero and value == 0):
        raise InvalidAction(name, f"must be {'above 0' if above_zero else '0 or more'} and at most {LONGEST_S:g}, not {shown(value)}")
