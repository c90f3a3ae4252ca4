"""Environments as callers of the gateway know them: opened once per key and name, found by id, ended by their lease.

They are opened detached: no process of the gateway takes them with it when it ends. The scheduler closes each when its lease is over, or,
where it has none, when it was not used for `TANGRAM_LEASE_S`.

An image that is named where no node has containers is kept as a label, and a warning says so.

What the store, the broker or a check of an action raises goes through here as it is. `app/gateway/shape.py` makes a `GatewayError` of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from redis import RedisError
from starlette.requests import Request

from app.gateway import calls
from app.gateway.errors import BadRequest, Cancelled, EnvironmentGone, GatewayError, NotFound
from app.gateway.journal import EnvironmentEnd, Journal
from app.gateway.records import Record, Records, Wanted, name_key
from app.gateway.sessions import Caller
from tangram.action import LONGEST_S, Action
from tangram.calls import close_environment, open_environment
from tangram.errors import ActionError, EnvironmentLost, InvalidAction, TangramError
from tangram.handles import Handle
from tangram.wire import CONTAINERS

OPENING_S = 3600.0
"""Seconds for which the record of an environment that is being opened is kept beyond its lease, which begins when it stands."""

SETTLE_S = 5.0

NAMED_S = 60.0
"""Seconds for which the id that a name leads to is remembered."""

_MOST_NAMED = 10_000

_log = logging.getLogger(__name__)


class Environments:
    """The environments of all callers; used by one event loop."""

    def __init__(self, records: Records, journal: Journal) -> None:
        self._records = records
        self._journal = journal
        self._closing: set[asyncio.Task[None]] = set()
        self._named: dict[str, tuple[float, str]] = {}

    async def open(
        self,
        caller: Caller,
        *,
        key: str | None = None,
        deadline_s: float | None = None,
        request: Request | None = None,
        **wanted: Unpack[Wanted],
    ) -> Record:
        """Open an environment and wait until it stands, or return the one that this job has under its `name` or `key`.

        `key` is an idempotency key of the request. It waits in the queue for at most `deadline_s` seconds. Where the connection of
        `request` breaks first, the open is cancelled; not so with a name or a key. Raises `GatewayError`, `TangramError` and `RedisError`;
        nothing is left of the environment then.
        """
        record = await self._record(caller, _names(caller.job, wanted.get("name", ""), key), wanted)
        environment = record.id
        action = _action(record)  # what is wrong with it is said before anything is written
        record = await self._enter(record)
        if record.state == "open":
            return record
        if record.id != environment:
            action = _action(record)
        return await self._opened(caller, record, action, deadline_s, None if record.names else request)

    async def begin(
        self, caller: Caller, *, files: Mapping[str, str], image: str | None, memory_mb: int | None, lease_s: float
    ) -> tuple[Record, Handle[Any]]:
        """Begin to open an environment for one request, and return it with the handle on its opening, without waiting for that.

        It has `files`, base64 by path, and `lease_s`. Actions on it may be submitted at once. Whoever begins it must `end` it.
        Raises as `open`.
        """
        record = await self._record(caller, (), {"image": image, "memory_mb": memory_mb, "lease_s": lease_s})
        action = _action(record)
        action = replace(action, arguments={**action.arguments, "files": json.dumps(files)})
        await self._records.enter(record)
        handle = caller.session.submit(await calls.put_aside(caller, action), record.open_id)
        calls.note(handle.id)
        return record, handle

    def end(self, caller: Caller, record: Record) -> None:
        """Have an environment closed; does not wait for that. Where it fails, the environment ends with its lease."""
        task = asyncio.create_task(self._end_beside(caller, record))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def settle(self) -> None:
        """Wait, a bounded time, for what `end` began."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=SETTLE_S)

    async def get(self, caller: Caller, environment: str) -> Record:
        """Return an environment of the caller's job, also one that another client has opened. Raises `NotFound` for others."""
        record = await self._records.read(environment) or await self._adopted(caller, environment)
        if record is None or record.job != caller.job:
            raise NotFound(f"environment {environment} is unknown: it was never opened, or was closed")
        if record.ends_at is not None and record.ends_at <= time.time():
            end = await self._end_of(record)
            if end is not None and not end.is_loss:  # actions on one that was lost say so
                raise _gone(record, end)
        return record

    async def _adopted(self, caller: Caller, environment: str) -> Record | None:
        """Return a record of an environment that stands, and that no gateway has opened."""
        known = await self._journal.standing(caller.job, environment)
        return None if known is None else await self._records.adopt(caller.job, environment, known)

    async def look(self, caller: Caller, environment: str) -> Record:
        """Return an environment of the caller's job that stands, as the journal knows, too.

        `get` is quicker and finds those that ended by themselves, on which actions say so. Raises `NotFound` for others, with the cause of
        their end.
        """
        record = await self.get(caller, environment)
        end = await self._end_of(record)
        if end is not None:
            raise _gone(record, end)
        return record

    async def find(self, caller: Caller, name: str) -> Record:
        """Return the environment that the caller's job has under a name. Raises `NotFound` where there is none."""
        key, now = name_key(caller.job, "name", name), time.monotonic()
        known = self._named.get(key)
        if known is not None and known[0] > now:
            record = await self._records.read(known[1])
            if record is not None and key in record.names:  # what takes the name over removes the record
                return record
        environment = await self._records.id_of(key)
        if environment is None:
            raise NotFound(f"there is no environment of the name {name!r}")
        record = await self.get(caller, environment)
        await self._records.keep(key, record)
        if len(self._named) >= _MOST_NAMED:
            self._named.clear()
        self._named[key] = now + NAMED_S, record.id
        return record

    async def list(self, caller: Caller) -> list[Record]:
        """Return the environments of the caller's job that stand, the oldest first. Raises `InfraFailed`."""
        standing = await self._journal.environments(caller.job)
        return await self._records.read_all(standing)

    async def renew(self, caller: Caller, environment: str, lease_s: float) -> Record:
        """Have the lease of an environment end `lease_s` seconds from now.

        Raises `NotFound`, also for one that has ended by itself, and `BadRequest` for no seconds or too many.
        """
        if not 0 < lease_s <= LONGEST_S:
            raise BadRequest(f"lease_s: must be above 0 and at most {LONGEST_S:g}, not {lease_s!r}")
        async with self._records.alone(environment):
            record = await self.get(caller, environment)
            end = await self._end_of(record)
            if end is not None:
                raise _gone(record, end)
            return await self._renewed(caller, record, lease_s, lease_s)

    async def extend(self, caller: Caller, environment: str, lease_s: float, for_s: float = 0.0) -> Record:
        """Have the lease of an environment end `lease_s` seconds after the `for_s` that a call takes, or later where it does so already.

        Of two calls at once, the longer one counts, whichever process serves it. For an environment of which something is asked next,
        which says so where it has ended by itself. Raises `NotFound`.
        """
        length_s = min(for_s + lease_s, LONGEST_S)
        async with self._records.alone(environment):
            record = await self.get(caller, environment)
            if record.ends_at is None or record.ends_at >= time.time() + length_s:
                return record
            return await self._renewed(caller, record, lease_s, length_s)

    async def _renewed(self, caller: Caller, record: Record, lease_s: float, length_s: float) -> Record:
        """Tell the scheduler of a lease, and write it down once the broker has the message: a call that fails has changed nothing."""
        record = record.model_copy(update={"lease_s": lease_s, "ends_at": time.time() + length_s})
        await asyncio.wrap_future(caller.session.renew_lease(record.place, length_s).sent)
        if not await self._records.change(record):
            raise NotFound(f"environment {record.id} was closed")
        return record

    async def close(self, caller: Caller, environment: str) -> None:
        """Close an environment and wait for that. Raises `NotFound` where it is not there, or is gone already."""
        record = await self.get(caller, environment)
        if not await self._end(caller, record):
            raise NotFound(f"environment {environment} was closed before")

    async def _record(self, caller: Caller, names: tuple[str, ...], wanted: Wanted) -> Record:
        opened_image = await self._opened_image(caller.job, wanted.get("image"))
        requires = (*wanted.get("requires", ()), *((CONTAINERS,) if opened_image is not None else ()))
        environment = caller.session.loads.new_environment(requires, wanted.get("memory_mb") or 0)
        now, lease_s = time.time(), wanted.get("lease_s")
        return Record(
            **{**wanted, "trajectory": wanted.get("trajectory") or environment, "opened_image": opened_image},
            id=environment,
            job=caller.job,
            open_id=f"{caller.session.client_id}-{secrets.token_hex(8)}",
            names=names,
            created_at=now,
            ends_at=None if lease_s is None else now + lease_s + OPENING_S,
            access_token=secrets.token_urlsafe(24),
        )

    async def _enter(self, record: Record) -> Record:
        """Write a record, or return the one that has its names already.

        Names are taken over from an environment that was closed or whose lease is over. A lost environment keeps its
        names until its owner closes it. Until then this raises the loss, so that nobody takes a blank environment for the lost one.
        """
        await self._records.enter(record)
        for name in record.names:
            while (other := await self._records.claim(name, record)) != record.id:
                found = await self._records.read(other)
                end = None if found is None else await self._end_of(found)
                if found is not None and (end is None or end.is_loss):
                    await self._records.forget(record.id, record.names)
                    if end is not None:
                        lost = f"environment {found.id} is lost: {end.reason}; its name is free once it is closed"
                        raise EnvironmentLost(lost, cause=end.cause)
                    return found
                await self._records.forget(other, (name,))
        return record

    async def _end_of(self, record: Record) -> EnvironmentEnd | None:
        """Return how an environment that stood has ended; None for one that stands, or is still to be opened."""
        return None if record.state != "open" else await self._journal.end_of(record.id)

    async def _opened(self, caller: Caller, record: Record, action: Action, deadline_s: float | None, request: Request | None) -> Record:
        """Submit the open of a record, unless that was done, and wait for it."""
        if deadline_s is not None:
            action = replace(action, queue_timeout_s=deadline_s)
        try:
            handle = caller.session.submit(action, record.open_id)
            calls.note(handle.id)
            await calls.wait(handle, cancel=not record.names, request=request)
            ends_at = None if record.lease_s is None else time.time() + record.lease_s
            record = record.model_copy(update={"state": "open", "ends_at": ends_at})
            if not await self._records.change(record):
                raise NotFound(f"environment {record.id} was closed while it was opened")
            if not record.names and request is not None and await request.is_disconnected():
                raise Cancelled(f"the caller of environment {record.id} is gone")
        except asyncio.CancelledError:
            if not record.names:
                self.end(caller, record)
            raise
        except (TangramError, RedisError) as error:
            if _tells_the_end(error):
                await self._records.forget(record.id, record.names)
            elif not record.names or isinstance(error, NotFound):
                self.end(caller, record)  # it may stand, or be on the point of it, and nobody will come back for it
            raise
        return record

    async def _end(self, caller: Caller, record: Record) -> bool:
        """Close an environment, whoever else does so too, and forget it; say whether it was there, or lost."""
        was_there = True
        try:
            await calls.run(caller, close_environment(record.place))
        except GatewayError as error:
            if not isinstance(error, NotFound) and not error.environment_lost:
                raise
            was_there = error.environment_lost
        await self._records.forget(record.id, record.names)
        return was_there

    async def _end_beside(self, caller: Caller, record: Record) -> None:
        """Close an environment beside the calls."""
        try:
            await self._end(caller, record)
        except (TangramError, RedisError) as error:
            _log.warning("environment %s could not be closed and is left to its lease: %s", record.id, error)

    async def _opened_image(self, job: str, image: str | None) -> str | None:
        """Return the image that an environment is opened with, if nodes have images."""
        if image is None:
            return None
        # What is wrong with it is said before anything is logged.
        replace(open_environment(job, image=image), action_class=_class_of(image))
        labels = await self._journal.labels()
        if labels and CONTAINERS not in labels:
            _log.warning("no node has containers: image %.256r is a label only", image)
            return None
        return image


def _class_of(name: str) -> str | None:
    """Return the class of opens with an image or a template of this name."""
    return name[:256] or None


def _tells_the_end(error: Exception) -> bool:
    """Say whether an open has ended without an environment. Else it may go on, or have ended with one."""
    known = error.__cause__ or error
    return isinstance(known, (ActionError, InvalidAction)) and known.cause != "result_lost"


def _gone(record: Record, end: EnvironmentEnd) -> EnvironmentGone:
    """Return what a call is told that only looks at an environment which has ended."""
    return EnvironmentGone(f"environment {record.id} {'is lost' if end.is_loss else 'has ended'}: {end.reason}", end.cause)


def _names(job: str, name: str, key: str | None) -> tuple[str, ...]:
    return tuple(name_key(job, kind, given) for kind, given in (("key", key), ("name", name)) if given)


def _action(record: Record) -> Action:
    requires = record.requires if record.opened_image is None else (*record.requires, CONTAINERS)
    action = open_environment(
        record.job,
        record.id,
        trajectory=record.trajectory,
        image=record.opened_image,
        memory_mb=record.memory_mb,
        requires=requires,
        detached=True,
        lease_s=record.lease_s,
        owner=f"gateway:{record.owner or 'api'}",
    )
    return replace(action, action_class=_class_of(record.image or record.template))
