"""Carries out the control requests of clients and operators: cancel, give, renew, drain.

A request changes the core only by an event. A request on which schedulers have failed is set aside like any other message
(`poison.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from scheduler.live import poison, reports
from scheduler.live.command_executor import CommandExecutor
from scheduler.live.entries import SetAside
from scheduler.live.poison import Quarantine
from scheduler.live.transport import Transport
from scheduler.model import commands, events
from scheduler.model.state import State

MOST_EARLY = 4096
"""Cancelled actions that are remembered until they come."""


class Requests:
    """Takes control requests. `handle` takes an event to the core and carries out its commands."""

    def __init__(
        self,
        state: State,
        transport: Transport,
        executor: CommandExecutor,
        quarantine: Quarantine,
        handle: Callable[[events.Event, float], None],
    ) -> None:
        self._state = state
        self._transport = transport
        self._executor = executor
        self._quarantine = quarantine
        self._handle = handle
        self._early: OrderedDict[str, None] = OrderedDict()
        """Cancelled actions that have not come yet. A scheduler that was replaced may have taken them, so that they come again later."""

    def take(self, body: object, now: float) -> None:
        """Read a request and carry it out. An invalid request is dropped."""
        match reports.read_control(body):
            case reports.Give() as given:
                self._executor.giving.take(given)
            case reports.Renew() as renew:
                renewed = events.LeaseRenewed(id=renew.environment, job=renew.job, lease_s=renew.lease_s)
                self._deal(poison.of_content("renew", renew.model_dump()), renewed, now)
            case reports.Drain() as drain:
                drained = events.NodeDrained(name=drain.node, draining=drain.draining)
                self._deal(poison.of_content("drain", drain.model_dump()), drained, now)
            case reports.Cancel() as cancel:
                cancelled = events.Cancelled(ids=tuple(cancel.ids), job=cancel.job, trajectory=cancel.trajectory)
                self._deal(poison.of_cancel(cancel), cancelled, now, partial(self._cancel_on_nodes, cancel, now))
                self._early.update(dict.fromkeys(one for one in cancel.ids if not self._executor.knows(one)))
                while len(self._early) > MOST_EARLY:
                    self._early.popitem(last=False)

    def arrived(self, action_id: str, now: float) -> None:
        """Cancel an action that has come, if its cancel came before it."""
        if action_id in self._early:
            del self._early[action_id]
            self.take({"cancel": {"ids": [action_id]}}, now)

    def _deal(self, message: poison.Message, event: events.Event, now: float, instead: Callable[[SetAside], None] | None = None) -> None:
        self._quarantine.deal(message, now, partial(self._handle, event, now), instead)

    def _cancel_on_nodes(self, request: reports.Cancel, now: float, found: SetAside) -> None:
        """Carry out a cancel that is set aside.

        Nodes stop the running actions, and the core cancels the waiting actions by their ids.
        """
        state, reason = self._state, poison.reason_of(found)
        if waiting := [one.id for one in state.waiting.values() if request.concerns(one.id, one.action.job, one.action.trajectory)]:
            message = poison.of_content("cancel", ["waiting", request.model_dump()])
            self._deal(message, events.Cancelled(ids=tuple(waiting)), now)
        for running in state.running.values():
            one = running.waiting
            if one.action.kind != "cpu.close" and request.concerns(one.id, one.action.job, one.action.trajectory):
                node, attempt = running.grant.node, running.grant.attempt
                self._executor.stop(commands.Stop(id=one.id, node=node, attempt=attempt, reason=reason, cause=poison.CAUSE))
        for environment in state.environments.values():
            if environment.state == "open" and environment.node and request.concerns("", environment.job, environment.trajectory):
                arguments = {"id": environment.id, "attempt": 0, "reason": reason}
                self._transport.send_control(environment.node, "tangram.close_environment", arguments)
