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
from scheduler.live.poison import Quarantine
from scheduler.model import events

MOST_EARLY = 100_000
"""Cancelled actions that are remembered until they come: as many as a job may have waiting."""


class Requests:
    """Takes control requests. `handle` takes an event to the core and carries out its commands."""

    def __init__(
        self,
        executor: CommandExecutor,
        quarantine: Quarantine,
        handle: Callable[[events.Event, float], None],
    ) -> None:
        self._executor = executor
        self._quarantine = quarantine
        self._handle = handle
        self._early: OrderedDict[str, None] = OrderedDict()
        """Cancelled actions that have not come yet. A scheduler that was replaced may have taken them, so that they come again later."""

    def take(self, body: object, now: float) -> None:
        """Read a request and carry it out. An invalid request is dropped."""
        match reports.read_control(body):
            case reports.Give() as given:
                self._executor.input_relay.take(given)
            case reports.Renew() as renew:
                renewed = events.LeaseRenewed(id=renew.environment, job=renew.job, lease_s=renew.lease_s)
                self._deal(poison.of_content("renew", renew.model_dump()), renewed, now)
            case reports.Drain() as drain:
                drained = events.NodeDrained(name=drain.node, draining=drain.draining)
                self._deal(poison.of_content("drain", drain.model_dump()), drained, now)
            case reports.Cancel() as cancel:
                cancelled = events.Cancelled(ids=tuple(cancel.ids), job=cancel.job, trajectory=cancel.trajectory)
                self._deal(poison.of_cancel(cancel), cancelled, now)
                self._early.update(dict.fromkeys(one for one in cancel.ids if not self._executor.knows(one)))
                while len(self._early) > MOST_EARLY:
                    self._early.popitem(last=False)

    def arrived(self, action_id: str, now: float) -> None:
        """Cancel an action that has come, if its cancel came before it."""
        if action_id in self._early:
            del self._early[action_id]
            self.take({"cancel": {"ids": [action_id]}}, now)

    def _deal(self, message: poison.Message, event: events.Event, now: float) -> None:
        self._quarantine.deal(message, now, partial(self._handle, event, now))
