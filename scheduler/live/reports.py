"""What the scheduler is sent besides actions: workers' reports, and control requests of clients and operators.

One class each. Each report is read in full first, and accepted or refused on its own. `tangram/wire.py` has the queues.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from scheduler.live.descriptions import node_spec, services_of
from scheduler.live.instances import entry_of
from scheduler.model import events
from scheduler.model.events import Count, Text, Word
from tangram.action import LONGEST_S, Action
from tangram.errors import first_problem
from tangram.wire import GIVEN_BYTES

log = logging.getLogger(__name__)

Excerpted = Annotated[str, Field(strict=True, max_length=2000)]


LONGEST_GIVEN = GIVEN_BYTES * 4 // 3 + 64


class ReportRefused(ValueError):
    """Raised for an invalid report. The message is a line about the problem."""


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True)


class Excerpt(_Report):
    """What the journal keeps of a command that has ended; see `workers/cpu/excerpt.py`."""

    command: Excerpted
    exit_code: Annotated[int, Field(strict=True, ge=-(1 << 31), lt=1 << 31)] | None
    stdout: Excerpted
    stderr: Excerpted


@dataclass(frozen=True, slots=True)
class Finished:
    """An action has ended. The core needs no `excerpt`. `allowed` is the (epoch, number) of the last allowance of its environment."""

    event: events.Finished
    excerpt: Excerpt | None
    allowed: tuple[int, int] | None = None

    def to(self, epoch: int) -> events.Finished:
        """Return the event for the core of an epoch, which knows its own allowances only."""
        if self.allowed is None:
            return self.event
        return replace(self.event, allowance_serial=self.allowed[1] if self.allowed[0] == epoch else 0)


class Unknown(_Report):
    """The worker never got this try, or no longer knows how it ended; `at` is when it was asked, by its clock."""

    id: Word
    attempt: Count
    at: float = math.inf


class Left(_Report):
    """The worker was stopped."""

    name: Word
    incarnation: Text = ""


class _Described(BaseModel):
    """Fields of a description that the heartbeats need in addition to the node."""

    name: Word
    running: list[Word]
    environments: list[Word]
    lost: list[tuple[Word, Text, Text]] = Field(default_factory=list)
    incarnation: Text = ""
    services: dict[str, dict[str, Any]] = Field(default_factory=dict)
    instances: list[Any] = Field(default_factory=list)
    held_cores: dict[str, list[int]] = Field(default_factory=dict)
    allowed: dict[Word, tuple[Count, Count, Count]] = Field(default_factory=dict)


class Beat(_Report):
    """The worker is there, and describes its node."""

    node: dict[str, Any]

    @field_validator("node")
    @classmethod
    def _makes_sense(cls, node: dict[str, Any]) -> dict[str, Any]:
        _Described.model_validate(node)
        try:
            json.dumps(node, allow_nan=False)  # the journal keeps it as JSON, which has neither NaN nor infinities
            node_spec(node)
            services_of(node)
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return node


class ServiceChanged(_Report):
    """An instance of a service on a node has come into another state."""

    model_config = ConfigDict(frozen=True, extra="allow")

    node: Word

    @property
    def instance(self) -> dict[str, Any]:
        """The report of the instance (`tangram.wire.WireInstance`)."""
        return dict(self.model_extra or {})

    def model_post_init(self, _context: object) -> None:
        """Refuse a report that describes no instance."""
        try:
            entry_of(self.node, self.instance, 0.0)
        except (LookupError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


Event = events.Started | events.Sent | events.Used | events.MemoryWanted
"""Reports that the core gets as they are."""

Report = Event | Finished | Unknown | Left | Beat | ServiceChanged


class Cancel(BaseModel):
    """A cancel: of tasks, of one trajectory of a job, or of a whole job."""

    ids: list[Word] = Field(default_factory=list)
    job: Word | None = None
    trajectory: Word | None = None


class Give(BaseModel):
    """An item that a client of a job gives to a command. Only the command's worker reads its content (`tangram.wire`)."""

    id: Word
    client: Text
    job: Text
    sender: Annotated[str, Field(strict=True, min_length=1, max_length=64)]
    number: Annotated[int, Field(strict=True, ge=1, lt=1 << 53)]
    what: Annotated[list[str | int], Field(min_length=1, max_length=3)]

    @field_validator("what")
    @classmethod
    def _is_bounded(cls, what: list[str | int]) -> list[str | int]:
        if sum(len(word) for word in what if isinstance(word, str)) > LONGEST_GIVEN:
            raise ValueError(f"longer than {LONGEST_GIVEN}")
        return what

    def may_reach(self, action: Action) -> bool:
        """Say whether the command is one of the sender's client or job."""
        return (self.client != "" and self.client == action.client) or self.job == action.job


class Renew(BaseModel):
    """The lease of an environment of a job is to end `lease_s` from now."""

    environment: Word
    job: Word
    lease_s: Annotated[float, Field(strict=True, gt=0, le=LONGEST_S)]


class Drain(BaseModel):
    """A node is to begin or cease to drain."""

    node: Word
    draining: Annotated[bool, Field(strict=True)]


ControlRequest = Cancel | Give | Renew | Drain


class _ControlRequest(BaseModel):
    cancel: Cancel | None = None
    give: Give | None = None
    renew: Renew | None = None
    drain: Drain | None = None


_END, _EXCERPT, _ALLOWED = TypeAdapter(events.Finished), TypeAdapter(Excerpt | None), TypeAdapter(tuple[Count, Count] | None)


def _finished(said: Mapping[str, object]) -> Finished:
    event, allowed = _END.validate_python({**said, "told_by": "worker"}), _ALLOWED.validate_python(said.get("allowed"))
    try:
        return Finished(event, _EXCERPT.validate_python(said.get("excerpt")), allowed)
    except ValidationError as error:
        log.warning("an excerpt makes no sense and is left out: %s", first_problem(error))
        return Finished(event, None, allowed)


_READERS: Mapping[str, Callable[[Mapping[str, object]], Report]] = {
    "started": TypeAdapter(events.Started).validate_python,
    "sent": TypeAdapter(events.Sent).validate_python,
    "used": TypeAdapter(events.Used).validate_python,
    "memory_wanted": TypeAdapter(events.MemoryWanted).validate_python,
    "finished": _finished,
    "unknown": Unknown.model_validate,
    "left": Left.model_validate,
    "joined": Beat.model_validate,
    "beat": Beat.model_validate,
    "service": ServiceChanged.model_validate,
}
"""How a report is read, by its `type`."""


def read(said: object) -> tuple[str, Report]:
    """Return a report and its type. Raises `ReportRefused`."""
    if not isinstance(said, Mapping) or not isinstance(kind := said.get("type"), str) or kind not in _READERS:
        raise ReportRefused(f"it is no report of a known type: {said!r:.80}")
    try:
        return kind, _READERS[kind](said)
    except ValidationError as error:
        raise ReportRefused(first_problem(error)) from error


def read_all(body: object) -> Iterator[tuple[str, Report]]:
    """Return the valid reports of a message with their types, and log the problems of all others."""
    said = body.get("events") if isinstance(body, Mapping) else None
    if not isinstance(said, list):
        log.warning("a message of a worker holds no reports and is dropped")
        return
    for one in said:
        try:
            yield read(one)
        except ReportRefused as error:
            log.warning("a report makes no sense and is dropped: %s", error)


def read_control(body: object) -> ControlRequest | None:
    """Return the control request of a client or an operator. If it is invalid, log the problem and return None."""
    try:
        request = _ControlRequest.model_validate(body)
        if (asked := request.cancel or request.give or request.renew or request.drain) is None:
            log.warning("a control request asks for nothing and is dropped")
        return asked
    except ValidationError as error:
        log.warning("a control request makes no sense and is dropped: %s", first_problem(error))
        return None
