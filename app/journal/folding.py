"""Folding a batch of entries into rows: what one transaction of the journal has to write.

Pure: entries in, rows out, no connection and no clock. The rule that everything here keeps: writing entries one
by one, all at once, or in any batches between leaves the same rows. It holds because

1. each entry only sets columns to values of its own, so that later entries of an action override earlier ones
   column by column, and one statement can write what several entries say;
2. reception never changes a row that is there (a redelivered message is not a second action);
3. the first end of an action stands, whatever follows;
4. a grant is given back once, by the first requeueing after it, which makes it an earlier one, or by the end of its action;
5. a resize overrides the one before it, and none changes a grant that was released;
6. what is forgotten of a node's instances is forgotten first, then come those that the batch tells of after that;
7. a failure on a message counts once for each epoch;
8. an action that has ended gets no message any more. A message goes with the first end, if a worker has stored that as the result.

A *shape* is the set of columns that a group of rows sets; rows of one shape share one statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from app.journal.models import ABSENT, IN_COLUMNS, NODE_UP, RUNNING, WAITING
from scheduler.live.entries import (
    ActionEnded,
    ActionGranted,
    ActionReceived,
    ActionRequeued,
    ActionResized,
    EndsPublished,
    Entry,
    EnvironmentChanged,
    InstanceChanged,
    InstancesForgotten,
    MessageFailed,
    NodeChanged,
)
from scheduler.model.commands import NoteDraining
from scheduler.model.lifecycle import ENVIRONMENT
from tangram.action import CELLS, CORES, DEFAULT_PRIORITY, QUOTA_PREFIX
from tangram.ends import fault_of_end

Row = dict[str, Any]
Shape = frozenset[str]

NO_ATTEMPT = 2**31 - 1
HELD = ("node", "resource", "units", "core_ids", "cell_ids", "background", "granted_at", "resized_at")
"""What a row of `actions` and one of `grants` both say of a grant."""
_OF_SHARD = " of shard "
_OF_GRANT = ("granted_at", "node", "units", "core_ids", "cell_ids", "background")
_OF_END = ("status", "cause", "started_at", "unit_s", "queue_s", "background_s", "overhead_s", "execution_s", "act_s", "cpu_s")


@dataclass(slots=True)
class _Action:
    received: Row | None = None
    change: Row = field(default_factory=dict)
    message: str | None = None
    answered: bool = False
    first_granted: int = NO_ATTEMPT
    resizes: dict[int, Row] = field(default_factory=dict)
    requeued_at: float | None = None
    earlier: list[Row] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return "ended_at" in self.change


class Fold:
    """The rows of one batch. Feed entries in order with `add`, then read the groups.

    `last_position` continues the order of reception over batches. All rows are those of a `shard`.
    """

    def __init__(self, last_position: int = 0, shard: int = 0) -> None:
        self.last_position = last_position
        self._shard = shard
        self.jobs: dict[str, Row] = {}
        self.published: dict[str, Row] = {}
        self.environments: dict[str, Row] = {}
        self.nodes: dict[str, Row] = {}
        self.draining: dict[str, Row] = {}
        self.services: dict[str, Row] = {}
        self.forgotten: dict[str, Row] = {}
        self.instances: dict[tuple[str, str, str], Row] = {}
        self.failures: dict[tuple[str, int], Row] = {}
        self._actions: dict[str, _Action] = {}

    def add(self, entries: Sequence[Entry]) -> None:
        """Fold `entries`, in order."""
        for entry in entries:
            match entry:
                case ActionReceived():
                    self._received(entry)
                case ActionGranted():
                    self._granted(entry)
                case ActionResized():
                    self._resized(entry)
                case ActionRequeued():
                    self._requeued(entry)
                case ActionEnded():
                    self._ended(entry)
                case EndsPublished():
                    self.published.update((clean(id), {"of": clean(id)}) for id in entry.ids)
                case EnvironmentChanged():
                    self._environment(entry)
                case NodeChanged():
                    self._node(entry)
                case NoteDraining():
                    self.draining[entry.name] = {"of": clean(entry.name), "in": self._shard, "draining": entry.draining}
                case InstanceChanged():
                    self._instance(entry)
                case InstancesForgotten():
                    self._forget(entry)
                case MessageFailed():
                    self._failed(entry)

    def received(self) -> list[Row]:
        """Return the rows of actions that this batch only received."""
        return [action.received for action in self._actions.values() if action.received and not action.change]

    def received_and_changed(self) -> dict[Shape, list[Row]]:
        """Return whole rows of actions received in this batch, by the columns that the batch then changed."""
        groups: dict[Shape, list[Row]] = {}
        for action in self._actions.values():
            if action.received and action.change:
                groups.setdefault(frozenset(action.change), []).append({**action.received, **action.change})
        return groups

    def changed(self) -> dict[Shape, list[Row]]:
        """Return the changes of actions received before, by the columns they set; `of` is the action's id."""
        groups: dict[Shape, list[Row]] = {}
        for id, action in self._actions.items():
            if action.change and not action.received:
                groups.setdefault(frozenset(action.change), []).append({**action.change, "of": id})
        return groups

    def messages(self) -> list[Row]:
        """Return the messages of actions received in this batch that have no result of a worker yet."""
        return [
            {"action": id, "message": action.message}
            for id, action in self._actions.items()
            if action.message is not None and not action.answered
        ]

    def answered(self) -> list[Row]:
        """Return the actions, each as `of`, whose result a worker has stored."""
        return [{"of": id} for id, action in self._actions.items() if action.answered]

    def given_back(self) -> list[Row]:
        """Return when (`at`) action `of` gave the grant back that it held before this batch.

        It is an attempt below `below`: were the batch written a second time, the action would hold one of the batch.
        """
        return [
            {"of": id, "below": action.first_granted, "at": action.requeued_at}
            for id, action in self._actions.items()
            if action.requeued_at is not None
        ]

    def resizes(self) -> list[Row]:
        """Return what attempt `tried` of action `of`, granted before this batch, holds after the last of its resizes."""
        return [{**row, "of": id, "tried": attempt} for id, action in self._actions.items() for attempt, row in action.resizes.items()]

    def earlier_grants(self) -> list[Row]:
        """Return the grants that this batch gave and took back."""
        return [grant for action in self._actions.values() for grant in action.earlier]

    def _of(self, id: str) -> _Action:
        id = clean(id)
        action = self._actions.get(id)
        if action is None:
            action = self._actions[id] = _Action()
        return action

    def _received(self, entry: ActionReceived) -> None:
        self.last_position = max(self.last_position + 1, int(entry.received_at * 1e6))
        header = entry.header
        kind, job = header["kind"], header.get("job", "default")
        self.jobs.setdefault(job, {"name": job, "first_seen_at": entry.received_at})
        action = self._of(entry.id)
        if action.received is not None:
            return
        action.message = clean(entry.message)
        action.received = {
            "id": clean(entry.id),
            "position": self.last_position,
            "job": job,
            "trajectory": header.get("trajectory", ""),
            "environment": header.get("environment"),
            "kind": kind,
            "action_class": header.get("action_class") or kind,
            "service": header.get("service"),
            "quota": _quota(header),
            "priority": header.get("priority", DEFAULT_PRIORITY),
            "status": WAITING,
            "reason": "",
            "attempts": 0,
            "header": {name: value for name, value in header.items() if name not in IN_COLUMNS},
            "submitted_at": entry.submitted_at,
            "received_at": entry.received_at,
            "shard": self._shard,
        }

    def _granted(self, entry: ActionGranted) -> None:
        action = self._of(entry.id)
        if action.has_ended:
            return
        action.first_granted = min(action.first_granted, entry.attempt)
        resource = CORES if entry.core_ids or entry.background else CELLS if entry.cell_ids else ""
        same = {name: getattr(entry, name) for name in _OF_GRANT}
        action.change.update({**same, "status": RUNNING, "reason": "", "attempts": entry.attempt, "resource": resource, "resized_at": None})

    def _resized(self, entry: ActionResized) -> None:
        action = self._of(entry.id)
        row = {"units": entry.units, "core_ids": entry.core_ids, "background": entry.background}
        row |= {"resized_at": entry.at, "unit_s": entry.unit_s}
        if action.has_ended:
            return
        if entry.attempt < action.first_granted:
            if action.requeued_at is None:
                action.resizes[entry.attempt] = row
        elif action.change["attempts"] == entry.attempt and action.change["core_ids"] is not None:
            action.change.update(row)

    def _requeued(self, entry: ActionRequeued) -> None:
        action = self._of(entry.id)
        if action.has_ended:
            return
        if action.first_granted == NO_ATTEMPT:
            action.requeued_at = entry.at if action.requeued_at is None else action.requeued_at
        elif action.change["core_ids"] is not None:
            held = {name: action.change[name] for name in HELD}
            action.earlier.append({**held, "action": clean(entry.id), "attempt": action.change["attempts"], "released_at": entry.at})
        gone = dict.fromkeys(("node", "units", "core_ids", "cell_ids", "background", "resized_at"))
        action.change.update({"status": WAITING, "reason": clean(entry.reason), "unit_s": entry.unit_s, **gone})

    def _ended(self, entry: ActionEnded) -> None:
        end, action = entry.end, self._of(entry.end.id)
        if action.has_ended:
            return
        # Whoever has to store the result needs the message, and may die before it is stored.
        action.answered = end.by_worker
        same = {name: getattr(end, name) for name in _OF_END}
        fault = fault_of_end(end.kind, end.cause)
        action.change.update({**same, "reason": clean(end.reason), "fault": fault, "ended_at": entry.at, "units": end.dop})
        if end.memory_mb is not None:
            action.change.update({"memory_mb": end.memory_mb, "resident_mb": end.resident_mb})
        if entry.excerpt is not None:
            action.change["excerpt"] = {name: clean(value) if isinstance(value, str) else value for name, value in entry.excerpt.items()}

    def _environment(self, entry: EnvironmentChanged) -> None:
        earlier = self.environments.get(entry.id)
        opened_at = entry.at if entry.state == "open" else None
        same = ("id", "job", "trajectory", "state", "node", "memory_mb", "pod_cores", "cause", "ends_at", "used_at")
        self.environments[entry.id] = {
            **{name: getattr(entry, name) for name in same},
            "reason": clean(entry.reason),
            "created_at": earlier["created_at"] if earlier else entry.at,
            "opened_at": earlier["opened_at"] if earlier and earlier["opened_at"] is not None else opened_at,
            "changed_at": entry.at,
            "ended_at": entry.at if entry.state in ENVIRONMENT.ends else None,
            "client": entry.client or None,
            "owner": clean(entry.owner),
            "shard": self._shard,
        }

    def _node(self, entry: NodeChanged) -> None:
        earlier = self.nodes.get(entry.name)
        joined_at = entry.at if entry.state == NODE_UP else earlier["joined_at"] if earlier else None
        self.nodes[entry.name] = {
            "name": entry.name,
            "state": entry.state,
            "reason": clean(entry.reason),
            "description": dict(entry.description),
            "joined_at": joined_at,
            "changed_at": entry.at,
            "shard": self._shard,
        }
        for name, description in entry.description.get("services", {}).items():
            self.services[name] = {"name": name, "node": entry.name, "description": description, "changed_at": entry.at}

    def _instance(self, entry: InstanceChanged) -> None:
        cells = ",".join(map(str, entry.cell_ids))
        row = asdict(entry) | {"cells": cells, "reason": clean(entry.reason), "changed_at": entry.at}
        self.instances[entry.node, entry.service, cells] = {name: row[name] for name in row if name not in ("cell_ids", "at")}

    def _forget(self, entry: InstancesForgotten) -> None:
        over = {"state": ABSENT, "reason": clean(entry.reason), "memory_mb": 0.0, "host_mb": 0.0, "changed_at": entry.at}
        for row in self.instances.values():
            if row["node"] == entry.node and row["state"] != ABSENT:
                row.update(over)
        # What the first one forgets is absent for all that follow.
        self.forgotten.setdefault(entry.node, {"of": entry.node, **over})

    def _failed(self, entry: MessageFailed) -> None:
        # One row for each scheduler: only the database knows which of them it has counted.
        key = failure_key(clean(entry.message), self._shard)
        self.failures[key, entry.epoch] = {
            "message": key,
            "kind": entry.kind,
            "action": clean(entry.action) if entry.action is not None else None,
            "failures": 1,
            "epoch": entry.epoch,
            "traceback": clean(entry.traceback),
            "failed_at": entry.at,
        }


def failure_key(message: str, shard: int) -> str:
    """Return the key of a message on which the schedulers of a shard have failed: several may fail on messages of the same key."""
    return f"{message}{_OF_SHARD}{shard}" if shard else message


def read_failure_key(key: str) -> tuple[str, int]:
    """Return the message's own key, and the shard."""
    message, separator, shard = key.rpartition(_OF_SHARD)
    return (message, int(shard)) if separator and shard.isdecimal() else (key, 0)


def clean(text: str) -> str:
    """Return `text` as both databases can store it: no NUL, no lone surrogates.

    Reasons quote what programs printed; one bad character must not keep a whole batch from being committed.
    """
    if "\0" in text:
        text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _quota(header: Mapping[str, Any]) -> str | None:
    for name in header.get("cost", ()):
        if name.startswith(QUOTA_PREFIX):
            return str(name[len(QUOTA_PREFIX) :])
    return None
