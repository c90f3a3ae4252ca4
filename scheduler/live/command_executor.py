"""Carries out the core's commands: writes journal entries and sends messages.

`commit` fixes the order: first the journal, then the messages and the acknowledgement of received messages. If the process dies
in between, the messages without acknowledgement come again. They are known by their task id.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.core.core import Core
from scheduler.core.nodes import may_open_elsewhere
from scheduler.live.ended_ids import EndedIds
from scheduler.live.entries import (
    ActionEnded,
    ActionGranted,
    ActionReceived,
    ActionRequeued,
    ActionResized,
    EndsPublished,
    Entry,
    EnvironmentChanged,
    Journal,
    NodeChanged,
    UnpublishedEnd,
)
from scheduler.live.input_relay import InputRelay
from scheduler.live.transport import Received, Transport
from scheduler.model import Evicted, Grant, commands
from scheduler.model.copied import filled
from scheduler.model.lifecycle import ACTION, ENVIRONMENT, NODE, NODE_HELD, ActionState, EnvironmentState, NodeState
from scheduler.quotas.answers import may_wait_again
from tangram.action import Action
from tangram.blobs import own
from tangram.ends import advice_of
from tangram.wire import BLOB_KEY_PREFIX, WireAllowance, WireEvicted, WireRegrant

log = logging.getLogger(__name__)


class CommandExecutor:
    """Carries out commands. Keeps the messages of unfinished actions, the entries to be committed, and counts of commands."""

    def __init__(self, core: Core, transport: Transport, journal: Journal, epoch: int) -> None:
        self._core = core
        self._transport = transport
        self._journal = journal
        self.epoch = epoch
        self._entries: list[Entry] = []
        self._unpublished: list[str] = []
        self._regrants: dict[str, list[WireRegrant]] = {}
        self._allowances: dict[str, list[WireAllowance]] = {}
        self._serial = 0
        self.messages: dict[str, str] = {}
        self.submitted_at: dict[str, float] = {}
        self._blobs: dict[str, list[str]] = {}
        self._blobs_of_ended: list[str] = []
        self.excerpts: Mapping[str, Mapping[str, Any] | None] = {}
        """What the journal is to keep of a command, while its report is carried out."""
        self.granted: dict[str, int] = {}
        self.ended = EndedIds()
        self.asked_again: set[str] = set()
        """Actions that their clients have submitted again before they ended: the store may have lost a result that was there."""
        self.descriptions: dict[str, Mapping[str, Any]] = {}
        self.environments: dict[str, EnvironmentState] = {}
        self._nodes: dict[str, NodeState] = {}
        self.input_relay = InputRelay(core.state, transport, self.ended)
        self.resizes = 0
        self.restores = 0

    def knows(self, action_id: str) -> bool:
        """Say whether the action came in before."""
        return action_id in self.messages or action_id in self.ended

    def keep(self, action_id: str, message: str, submitted_at: float, blobs: Iterable[object] = ()) -> None:
        """Keep an action's message, and the blobs that it refers to, until the action has ended."""
        self.messages[action_id] = message
        self.submitted_at[action_id] = submitted_at
        keys = [key for key in blobs if isinstance(key, str) and key.startswith(BLOB_KEY_PREFIX)]
        if keys:
            self._blobs[action_id] = keys

    def keep_blobs(self) -> None:
        """Keep the blobs alive that messages refer to."""
        if self._blobs:
            self._transport.keep_blobs([key for keys in self._blobs.values() for key in keys])

    def give_back(self, blobs: Iterable[object]) -> None:
        """Have blobs removed that nobody asks for again."""
        self._blobs_of_ended += own(blobs)

    def drop_blobs(self) -> None:
        """Remove the blobs of actions that have ended: until then one may be granted again, and needs its arguments."""
        if self._blobs_of_ended:
            self._transport.keep_blobs(self._blobs_of_ended, 0)
            self._blobs_of_ended = []

    def note_received(self, action_id: str, action: Action, now: float) -> None:
        """Write down an action that came in. Its message must be kept already."""
        self.input_relay.arrived(action_id, action)
        self._entries.append(
            ActionReceived(
                id=action_id,
                header=action.to_header(),
                message=self.messages[action_id],
                submitted_at=self.submitted_at[action_id],
                received_at=now,
            )
        )

    def note(self, entry: Entry) -> None:
        """Write down an entry that follows from no command."""
        self._entries.append(entry)

    def commit(self, batch: Sequence[Received]) -> None:
        """Write the entries as one group, then send, and acknowledge `batch`."""
        self.write()
        for node in [*self._regrants, *self._allowances]:
            self._send_regrants(node)
        self._transport.flush(batch)
        published = len(self._unpublished) - self._transport.ends_to_store
        if published:
            self._entries.append(EndsPublished(ids=tuple(self._unpublished[:published])))
            del self._unpublished[:published]

    def write(self) -> None:
        """Write the entries as one group."""
        entries, self._entries = self._entries, []
        if entries:
            self._journal.write(entries)

    def carry_out(self, command: commands.Command, now: float) -> None:
        """Turn a command into journal entries and messages. They go out with the next `commit`."""
        match command:
            case commands.Start():
                self._start(command, now)
            case commands.Finish():
                self._finish(command, now)
            case commands.Resize():
                self._resize(command, now)
            case commands.Allow():
                self._allowances.setdefault(command.node, []).append((command.environment, command.allowance_mb, command.serial))
            case commands.Stop():
                self.stop(command)
            case commands.Restore():
                self.restores += 1
                arguments: dict[str, Any] = {
                    "service": command.service,
                    "cell_ids": list(command.cell_ids),
                    "evict": wire_evictions(command.evict),
                }
                self._transport.send_control(command.node, "tangram.restore", arguments)
            case commands.CloseEnvironment():
                arguments = {"id": command.id, "attempt": 0, "reason": command.reason}
                self._transport.send_control(command.node, "tangram.close_environment", arguments)
            case commands.Requeue():
                ACTION.next(self._action_state(command.id), "waiting")
                log.warning("action %s waits again: %s", command.id, command.reason)
                del self.granted[command.id]  # no result of that try counts: it was given up or withdrawn, or has ended without one
                self._entries.append(ActionRequeued(id=command.id, reason=command.reason, at=now, unit_s=self._unit_s(command.id)))
            case commands.NoteEnvironment():
                self._note_environment(command, now)
            case commands.NoteNode():
                self._note_node(command, now)
            case commands.NoteDraining():
                log.info("node %s is %s", command.name, "draining" if command.draining else "draining no more")
                self._entries.append(command)

    def stop(self, command: commands.Stop) -> None:
        """Ask a node to end a running action.

        Sending it twice is harmless. The cause is left out for a worker that knows no causes.
        """
        arguments: dict[str, Any] = {"id": command.id, "attempt": command.attempt, "reason": command.reason}
        if self.descriptions.get(command.node, {}).get("takes_causes"):
            arguments["cause"] = command.cause
        self._transport.send_control(command.node, "tangram.stop", arguments)

    def _action_state(self, action_id: str) -> ActionState | None:
        if action_id not in self.messages:
            return None
        return "running" if action_id in self.granted else "waiting"

    def _note_node(self, command: commands.NoteNode, now: float) -> None:
        state = NODE.next(self._nodes.pop(command.name, None), command.state)
        if state in NODE_HELD:
            self._nodes[command.name] = state
        log.log(logging.WARNING if command.state in ("silent", "lost") else logging.INFO, "node %s is %s", command.name, _because(command))
        description = self.descriptions.get(command.name, {})
        self._entries.append(NodeChanged(name=command.name, state=command.state, description=description, at=now, reason=command.reason))

    def _start(self, command: commands.Start, now: float) -> None:
        ACTION.next(self._action_state(command.id), "running")
        grant = command.grant
        self.restores += grant.restore
        self.granted[command.id] = grant.attempt
        self._entries.append(filled(ActionGranted, grant, id=command.id, granted_at=now))
        self._send_regrants(grant.node)
        self._transport.send_action(grant.node, self.messages[command.id], self.grant_header(command.id, grant, now))
        self.input_relay.started(command.id, grant.node)

    def grant_header(self, action_id: str, grant: Grant, granted_at: float) -> dict[str, Any]:
        """Return the grant as a message for a node carries it (`tangram.wire.WireGrant`)."""
        running = self._core.state.running.get(action_id)
        return {
            "node": grant.node,
            "attempt": grant.attempt,
            "epoch": self.epoch,
            "incarnation": str(self.descriptions.get(grant.node, {}).get("incarnation", "")),
            "units": grant.units,
            "most_units": self._most_units(action_id, grant),
            "core_ids": list(grant.core_ids),
            "background": grant.background,
            "cell_ids": list(grant.cell_ids),
            "evict": wire_evictions(grant.evict),
            "restore": grant.restore,
            "submitted_at": self.submitted_at[action_id],
            "received_at": running.waiting.received_at if running is not None else granted_at,
            "granted_at": granted_at,
            **({"allowance_mb": grant.allowance_mb, "allowance_serial": grant.allowance_serial} if grant.allowance_mb else {}),
            **(self._words_of(running.waiting.action, grant) if running is not None else {}),
        }

    def _words_of(self, action: Action, grant: Grant) -> dict[str, Any]:
        """Return the fields that only grants of opens and grants with quotas have."""
        if not action.cost.quotas:
            return {"may_wait_again": True} if may_open_elsewhere(self._core.state, action, grant) else {}
        words: dict[str, Any] = {"may_wait_again": may_wait_again(action, grant)}
        if grant.not_before:
            words["not_before"] = grant.not_before
        headers = [header for name in action.cost.quotas if (header := self._core.pools.quotas.usage_headers.get(name))]
        if headers:
            words["usage_header"] = headers[0]
        hosts = [hosts for name in action.cost.quotas if (hosts := self._core.pools.quotas.hosts.get(name))]
        if hosts:
            words["hosts"] = list(hosts[0])
        return words

    def _most_units(self, action_id: str, grant: Grant) -> int:
        """Return the number of units to which a grant may grow on its node."""
        state = self._core.state
        running, node = state.running.get(action_id), state.nodes.get(grant.node)
        grows = state.rules.resizes and bool(grant.core_ids or grant.background)
        if running is None or node is None or not grows or not running.waiting.action.preemptible:
            return grant.units
        waiting = running.waiting
        return max((amount for amount in waiting.units if amount <= min(waiting.best, node.spec.cores)), default=grant.units)

    def _unit_s(self, action_id: str) -> float:
        """Return the unit-seconds that an action has held so far. Those of one that ends by the same event come with its end."""
        running, waiting = self._core.state.running.get(action_id), self._core.state.waiting.get(action_id)
        waiting = running.waiting if running is not None else waiting
        return waiting.unit_s if waiting is not None else 0.0

    def _resize(self, command: commands.Resize, now: float) -> None:
        self.resizes += 1
        self._entries.append(filled(ActionResized, command, at=now, unit_s=self._unit_s(command.id)))
        self.regrant(command.node, command.id, command)

    def regrant(self, node: str, action_id: str, grant: Grant | commands.Resize) -> None:
        """Send a node the cores of a running action. Sending them twice is harmless.

        All changes for a node go out in one message. The message goes out before the next action that starts on the node, which may
        get cores that other actions lose. Otherwise it goes out with the next `commit`.
        """
        self._regrants.setdefault(node, []).append((action_id, grant.attempt, list(grant.core_ids), grant.background))

    def _send_regrants(self, node: str) -> None:
        grants = self._regrants.pop(node, None)
        if grants:
            self._serial += 1
            self._transport.send_control(node, "tangram.regrant", {"epoch": self.epoch, "serial": self._serial, "grants": grants})
        allowances = self._allowances.pop(node, None)
        if allowances:
            self._transport.send_control(node, "tangram.allow", {"epoch": self.epoch, "allowances": allowances})

    def _finish(self, command: commands.Finish, now: float) -> None:
        ACTION.next(self._action_state(command.id), command.status)
        message = self.messages.pop(command.id)
        blobs = self._blobs.pop(command.id, [])
        self.input_relay.ended(command.id)
        self.submitted_at.pop(command.id, None)
        granted = self.granted.pop(command.id, None)
        if granted is not None or advice_of(command.cause) != "try again later":  # else it may be offered again, with the same blobs
            self.give_back(blobs)
        self.ended.add(command.id)
        self._entries.append(ActionEnded(end=command, at=now, excerpt=self.excerpts.get(command.id)))
        asked_again = command.id in self.asked_again
        self.asked_again.discard(command.id)
        if command.by_worker and asked_again:
            self._transport.tell_lost(command.id)
        elif not command.by_worker:
            self.publish_end(filled(UnpublishedEnd, command, message=message))

    def publish_end(self, end: UnpublishedEnd) -> None:
        """Have the result of an action without a worker stored, and note when it is stored."""
        self._transport.store_end(end)
        self._unpublished.append(end.id)

    def _note_environment(self, command: commands.NoteEnvironment, now: float) -> None:
        known = self.environments.get(command.id)
        if command.state != known:
            self.environments[command.id] = ENVIRONMENT.next(known, command.state)
        if command.state in ENVIRONMENT.ends:
            del self.environments[command.id]
        self._entries.append(filled(EnvironmentChanged, command, pod_cores=len(command.pod_core_ids), at=now))


def wire_evictions(evicted: Sequence[Evicted]) -> list[WireEvicted]:
    """Return the instances to evict, as messages name them."""
    return [{"service": one.service, "cell_ids": list(one.cell_ids)} for one in evicted]


def _because(command: commands.NoteNode) -> str:
    return f"{command.state}: {command.reason}" if command.reason else command.state
