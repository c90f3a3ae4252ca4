"""The pool of quotas: which actions may call an outside API now.

Actions that only call wait here, in the queue of their first quota's account, and run on a node of the pool `api`. Actions on cores
and cells may need quotas, too. Their pools ask `keeps_back` before they start an action, and call `take` when they start it. A
group that was kept back by a quota is looked at again when the quota opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.model import Grant, QuotaSpec, Running, Waiting, events
from scheduler.model.commands import Command, Start
from scheduler.model.group import Changeable
from scheduler.model.state import Node, State
from scheduler.quotas.account import Account, by_quota
from scheduler.quotas.answers import only_calls
from tangram.action import QUOTA_PREFIX, Action

Draw = tuple[Account, int, int]
"""An account, and the requests and tokens that an action takes of it."""


class QuotaPool:
    """The accounts by the names of their quotas, and the groups that wait for each."""

    def __init__(self, state: State, specs: Sequence[QuotaSpec]) -> None:
        self._state = state
        self._changed: dict[Account, None] = {}
        self.accounts = by_quota(specs, self._changed)
        self.usage_headers = {spec.name: spec.usage_header for spec in specs if spec.usage_header is not None}
        self.hosts = {spec.name: spec.hosts for spec in specs if spec.hosts}
        self._kept_back: dict[Account, dict[Changeable, int]] = {}
        """For each account, the groups in which it keeps actions back, with the least requests of such an action."""
        for account in dict.fromkeys(self.accounts.values()):
            state.shares.offer(f"{QUOTA_PREFIX}{account.name}", account.spec.concurrency or 0)

    def draws(self, action: Action) -> list[Draw]:
        """Return each account that an action draws on, with the action's requests and tokens."""
        names = action.cost.quotas
        if not names:
            return []
        drawn: dict[Account, tuple[int, int]] = {}
        for name in names:
            account = self.accounts[name]
            requests, tokens = drawn.get(account, (0, 0))
            drawn[account] = (requests + action.cost.least(QUOTA_PREFIX + name), tokens + action.cost.tokens(name))
        return [(account, requests, tokens) for account, (requests, tokens) in drawn.items()]

    # A condition of starting

    def keeps_back(self, waiting: Waiting, group: Changeable, now: float) -> bool:
        """Say whether a quota keeps an action back. If so, its group is looked at again when the quota opens."""
        for account, requests, _ in self.draws(waiting.action):
            if account.opens_at(now, requests, _lead_s(account, group)) != now:
                kept = self._kept_back.setdefault(account, {})
                kept[group] = min(requests, kept.get(group, requests))
                return True
        return False

    def take(self, waiting: Waiting, now: float) -> float:
        """Take the requests of an action that starts; return when they may go."""
        draws = self.draws(waiting.action)
        at = max((account.goes_at(now, requests) for account, requests, _ in draws), default=now)
        self._take(waiting.action, draws, at)
        return at

    def _take(self, action: Action, draws: Sequence[Draw], at: float) -> None:
        for account, requests, tokens in draws:
            account.take(at, requests, tokens)
            self._state.shares.hold(action.job, f"{QUOTA_PREFIX}{account.name}", requests)

    def forget(self, group: Changeable) -> None:
        """Forget a group that is gone."""
        for kept in self._kept_back.values():
            kept.pop(group, None)
        self._kept_back = {account: kept for account, kept in self._kept_back.items() if kept}

    # The pool

    def refusal(self, action: Action) -> str | None:
        """Return why an action can never get its quotas."""
        for name in action.cost.quotas:
            if name not in self.accounts:
                return f"quota {name!r} is not declared"
        for account, requests, tokens in self.draws(action):
            most_requests, rate, most_tokens = account.spec.concurrency, account.spec.rate_per_s, account.spec.tokens_per_min
            if most_requests is not None and requests > most_requests:
                return f"needs {requests} requests at once, quota {account.name!r} allows {most_requests}"
            if rate is not None and requests > max(60.0 * rate, account.spec.burst or 1):
                return f"needs {requests} requests, quota {account.name!r} allows {60.0 * rate:g} a minute"
            if most_tokens is not None and tokens > most_tokens:
                return f"needs {tokens} tokens, quota {account.name!r} allows {most_tokens:g} a minute"
        return self._state.refusal(action, "api", 0) if only_calls(action) else None

    def enqueue(self, waiting: Waiting, now: float) -> None:
        """Take in an action that only calls."""
        account = self.accounts[waiting.action.cost.quotas[0]]
        account.queue.add(waiting)
        account.touch()

    def withdraw(self, waiting: Waiting) -> None:
        """Take a waiting action out of its queue."""
        account = self.accounts[waiting.action.cost.quotas[0]]
        account.queue.remove(waiting)
        account.touch()

    def release(self, running: Running, now: float) -> None:
        """End the requests of an action."""
        action = running.waiting.action
        for account, requests, _ in self.draws(action):
            account.give_back(requests)
            self._state.shares.hold(action.job, f"{QUOTA_PREFIX}{account.name}", -requests)
        if action.cost.quotas:
            self.wake(now)

    def resume(self, running: Running, now: float) -> list[Command]:
        """Count the requests of an action that an earlier scheduler started. The journal does not hold its time to go."""
        self._declare(running.waiting.action)
        draws = self.draws(running.waiting.action)
        if draws:
            not_before = running.granted_at + max(account.spec.lead_s for account, _, _ in draws)
            running.grant = replace(running.grant, not_before=not_before)
        self._take(running.waiting.action, draws, running.goes_at)
        return []

    def joined(self, node: Node) -> None:
        """Look again at actions that have waited for a node."""
        for account in self.accounts.values():
            account.touch()

    def gone(self, node: Node) -> None:
        """Do nothing: no request is bound to a node."""

    def look_again(self, node: Node) -> None:
        """Look again at waiting actions."""
        for account in self.accounts.values():
            if len(account.queue):
                account.touch()

    @property
    def changed(self) -> bool:
        """Whether `allocate` would hold a round."""
        return bool(self._changed)

    def allocate(self, now: float) -> list[Command]:
        """Start the calls that may go."""
        out = list[Command]()
        while self._changed:
            account = next(iter(self._changed))
            del self._changed[account]
            out += self._start_calls(account, now)
        return out

    def _start_calls(self, account: Account, now: float) -> list[Command]:
        started, out = list[Waiting](), list[Command]()
        for waiting in self._state.in_order([account.queue], now):
            if self.keeps_back(waiting, account, now):
                if account.opens_at(now, 1, account.spec.lead_s) != now:
                    break
                continue
            node = self._state.least_busy("api", waiting)
            if node is None:
                continue
            goes_at = self.take(waiting, now)
            grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1, not_before=goes_at if goes_at > now else 0.0)
            self._state.start(waiting, grant, now, waiting.durations_s[0])
            out.append(Start(id=waiting.id, grant=grant))
            started.append(waiting)
        for waiting in started:  # only now: the walk must not see the queue change
            account.queue.remove(waiting)
        return out

    def wake(self, now: float) -> None:
        """Look again at the groups whose quotas have opened."""
        for account in [account for account in self._kept_back if self._opens_at(account, now) == now]:
            for group in self._kept_back.pop(account):
                group.touch()

    def next_wake(self, now: float) -> float | None:
        """Return when the next quota with waiting actions opens; None if no quota opens by itself."""
        if not self._kept_back:
            return None
        return min((at for at in (self._opens_at(account, now) for account in self._kept_back) if at is not None), default=None)

    def _opens_at(self, account: Account, now: float) -> float | None:
        """Return when an account has room for an action that it keeps back. An action with fewer requests may have less lead."""
        asked = dict.fromkeys((requests, _lead_s(account, group)) for group, requests in self._kept_back[account].items())
        return min((at for requests, lead_s in asked if (at := account.opens_at(now, requests, lead_s)) is not None), default=None)

    # Reports of requests

    def went_out(self, running: Running, at: float) -> None:
        """Count the requests of an action as gone out at `at`."""
        planned_s, running.sent_at = running.goes_at, max(running.goes_at, at)
        for account, requests, _ in self.draws(running.waiting.action):
            account.went_out(planned_s, running.sent_at, requests)

    def answered(self, running: Running, event: events.Finished, now: float) -> None:
        """Learn from the end of an action. The caller gives its places back."""
        answer = event.answer
        for account, requests, tokens in self.draws(running.waiting.action):
            if answer is not None and answer.refuses:
                account.throttle.refused(running.granted_at, now, answer.retry_after_s)
            elif event.status == "succeeded" and (answer is None or answer.status < 500):
                account.throttle.succeeded(running.granted_at, now)
            if answer is not None:
                # A refusal without a cost counts as free. For other answers without a cost, the declared tokens count.
                spent = answer.tokens if answer.tokens is not None else 0 if answer.refuses else tokens
                account.charge(max(0, answer.requests - requests), spent - tokens, now)

    def never_made(self, running: Running, now: float) -> None:
        """Give back the tokens of requests that were never made. They are made under another grant."""
        for account, _, tokens in self.draws(running.waiting.action):
            account.charge(0, -tokens, now)

    def made_now(self, running: Running, now: float) -> None:
        """Count the requests of an action as made once more, now."""
        for account, requests, _ in self.draws(running.waiting.action):
            account.charge(requests, 0, now)

    def spent(self, action: Action, granted_at: float) -> None:
        """Count the requests and tokens of an action that has ended."""
        self._declare(action)
        for account, requests, tokens in self.draws(action):
            account.spend(granted_at + account.spec.lead_s, requests, tokens)

    def _declare(self, action: Action) -> None:
        """Take up an action's quotas that are no longer declared."""
        for name in action.cost.quotas:
            self.accounts.setdefault(name, Account(QuotaSpec(name=name), self._changed))


def _lead_s(account: Account, group: Changeable) -> float:
    """Return how long ahead of its time a request may be granted. Only workers of pure calls can wait for the time."""
    return account.spec.lead_s if isinstance(group, Account) else 0.0
