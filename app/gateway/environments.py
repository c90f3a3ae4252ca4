"""Environments as callers of the gateway know them: opened once per key and name, found by id, ended by their lease.

They are opened detached: no process of the gateway takes them with it when it ends. One with a lease is closed when that is over, by
whichever process notices first. Besides, the scheduler closes what has not been used for `TANGRAM_LEASE_S`.

An image that is named where no node has containers is kept as a label, and a warning says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from redis import RedisError
from redis.asyncio import Redis
from starlette.requests import Request

from app.gateway import calls
from app.gateway.errors import BadRequest, GatewayError, InfraFailed, NotFound, classify
from app.gateway.journal import Journal
from app.gateway.records import Record, Records, name_key
from app.gateway.sessions import Caller, Sessions
from tangram.action import Action
from tangram.calls import close_environment, open_environment
from tangram.errors import TangramError
from tangram.handles import Handle

LOOK_S = 1.0
"""Seconds between two looks for leases that are over."""

OPENING_S = 3600.0
"""Seconds that the opening of an environment may take beyond its lease, which begins when it stands."""

SETTLE_S = 5.0

_AT_ONCE = 256
_CONTAINERS = "isolation:container"
_log = logging.getLogger(__name__)


class Environments:
    """The environments of all callers; used by one event loop."""

    def __init__(self, store: Redis, journal: Journal, sessions: Sessions) -> None:
        """Keep records in `store` and read the rest from the journal."""
        self._records = Records(store)
        self._journal = journal
        self._sessions = sessions
        self._closing: dict[str, asyncio.Task[None]] = {}

    async def open(
        self,
        caller: Caller,
        *,
        image: str | None = None,
        template: str = "",
        memory_mb: int | None = None,
        requires: tuple[str, ...] = (),
        trajectory: str = "",
        metadata: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        owner: str = "",
        name: str = "",
        key: str | None = None,
        lease_s: float | None = None,
        deadline_s: float | None = None,
        request: Request | None = None,
    ) -> Record:
        """Open an environment and wait until it stands, or return the one that this job has under `name` or `key`.

        Parameters
        ----------
        caller
            For whom.
        image, template
            What it is made from, and what the caller calls that.
        memory_mb
            Memory that is reserved for it, MB.
        requires
            Labels that its node must have.
        trajectory
            The rollout that it belongs to; its own id by default.
        metadata, variables, owner
            Kept with it, for the shape: `variables` are the environment variables that its commands are to have.
        name, key
            A name within the job, and an idempotency key of the request.
        lease_s
            Seconds after which it is closed, in use or not, unless `renew` says otherwise; by default only where it is unused.
        deadline_s
            Longest wait in the queue, seconds.
        request
            Where its connection breaks first, the open is cancelled; not so with a name or a key.

        Raises
        ------
        GatewayError
            As its classes say; nothing is left of the environment then.

        """
        record = self._record(caller, trajectory, _names(caller.job, name, key), lease_s, image=image, memory_mb=memory_mb)
        record = record.model_copy(
            update={
                "opened_image": image if image is not None and await self._has_images(image) else None,
                "template": template,
                "requires": requires,
                "metadata": dict(metadata or {}),
                "variables": dict(variables or {}),
                "owner": owner,
                "name": name,
            }
        )
        environment = record.id
        action = _action(record)  # what is wrong with it is said before anything is written
        try:
            record = await self._enter(record)
        except RedisError as error:
            raise classify(error) from error
        if record.state == "open":
            return record
        if record.id != environment:
            action = _action(record)
        return await self._opened(caller, record, action, deadline_s, None if record.names else request)

    async def begin(
        self, caller: Caller, *, files: Mapping[str, str], image: str | None, memory_mb: int | None, lease_s: float
    ) -> tuple[Record, Handle[Any]]:
        """Begin to open an environment for one request, and return it with the handle on its opening, without waiting for that.

        It has `files`, base64 by path, and `lease_s` begins now. Actions on it may be submitted at once. Whoever begins it must `end` it.
        Raises `GatewayError`.
        """
        record = self._record(caller, "", (), lease_s, image=image, memory_mb=memory_mb)
        if image is not None and await self._has_images(image):
            record = record.model_copy(update={"opened_image": image})
        action = _action(record)
        action = replace(action, arguments={**action.arguments, "files": json.dumps(files)})
        try:
            await self._records.enter(record)
            handle = caller.session.submit(await calls.put_aside(caller, action), record.open_id)
        except (TangramError, RedisError) as error:
            raise classify(error) from error
        calls.note(handle.id)
        return record, handle

    def end(self, caller: Caller, record: Record) -> None:
        """Have an environment closed; does not wait for that. Where it fails, the environment ends with its lease."""
        self._keep(record.id, self._end(caller, record))

    async def settle(self) -> None:
        """Wait, a bounded time, for what `end` began."""
        if self._closing:
            await asyncio.wait(self._closing.values(), timeout=SETTLE_S)

    async def get(self, caller: Caller, environment: str) -> Record:
        """Return an environment of the caller's job. Raises `NotFound` for others."""
        try:
            record = await self._records.read(environment)
        except RedisError as error:
            raise classify(error) from error
        if record is None or record.job != caller.job:
            raise NotFound(f"environment {environment} is unknown: it was never opened, or was closed")
        return record

    async def look(self, caller: Caller, environment: str) -> Record:
        """Return an environment of the caller's job that stands, as the journal knows, too.

        `get` is quicker and finds those that ended by themselves, on which actions say so. Raises `NotFound` for others.
        """
        record = await self.get(caller, environment)
        if not await self._has_ended(record):
            return record
        raise NotFound(f"environment {environment} has ended")

    async def find(self, caller: Caller, name: str) -> Record:
        """Return the environment that the caller's job has under a name. Raises `NotFound` where there is none."""
        try:
            environment = await self._records.id_of(name_key(caller.job, "name", name))
        except RedisError as error:
            raise classify(error) from error
        if environment is None:
            raise NotFound(f"there is no environment of the name {name!r}")
        return await self.get(caller, environment)

    async def list(self, caller: Caller) -> list[Record]:
        """Return the environments of the caller's job that stand, the oldest first. Raises `InfraFailed`."""
        standing = await self._journal.environments(caller.job)
        try:
            return await self._records.read_all(standing)
        except RedisError as error:
            raise classify(error) from error

    async def renew(self, caller: Caller, environment: str, lease_s: float) -> Record:
        """Have the lease of an environment end `lease_s` seconds from now. Raises `NotFound`, and `BadRequest` for no seconds."""
        if not lease_s > 0:
            raise BadRequest(f"lease_s: must be above 0, not {lease_s!r}")
        record = await self.get(caller, environment)
        record = record.model_copy(update={"lease_s": lease_s, "ends_at": time.time() + lease_s})
        try:
            if not await self._records.change(record):
                raise NotFound(f"environment {environment} was closed")
        except RedisError as error:
            raise classify(error) from error
        return record

    async def close(self, caller: Caller, environment: str) -> None:
        """Close an environment and wait for that. Raises `NotFound` where it is not there, or is gone already."""
        record = await self.get(caller, environment)
        try:
            await self._end(caller, record)
        except RedisError as error:
            raise classify(error) from error

    async def end_leases(self) -> None:
        """Close environments whose lease is over, until cancelled."""
        while True:
            try:
                for environment in await self._records.overdue(time.time(), _AT_ONCE):
                    if environment not in self._closing:
                        self._keep(environment, self._end_lease(environment))
            except RedisError as error:
                _log.warning("leases cannot be ended now: %s", error)
            await asyncio.sleep(LOOK_S)

    def _record(
        self, caller: Caller, trajectory: str, names: tuple[str, ...], lease_s: float | None, *, image: str | None, memory_mb: int | None
    ) -> Record:
        environment, now = f"env-{secrets.token_hex(8)}", time.time()
        return Record(
            id=environment,
            job=caller.job,
            trajectory=trajectory or environment,
            open_id=f"{caller.session.client_id}-{secrets.token_hex(8)}",
            image=image,
            memory_mb=memory_mb,
            names=names,
            created_at=now,
            lease_s=lease_s,
            ends_at=None if lease_s is None else now + lease_s + OPENING_S,
            access_token=secrets.token_urlsafe(24),
        )

    async def _enter(self, record: Record) -> Record:
        """Write a record, or return the one that has its names already."""
        await self._records.enter(record)
        for name in record.names:
            while (other := await self._records.claim(name, record)) != record.id:
                found = await self._records.read(other)
                if found is not None and not await self._has_ended(found):
                    await self._records.forget(record.id, record.names)
                    return found
                await self._records.forget(other, (name,))
        return record

    async def _has_ended(self, record: Record) -> bool:
        """Say whether an environment that stood has ended, by whatever reason; its record is removed then."""
        if record.state == "opening" or await self._journal.stands(record.id):
            return False
        await self._records.forget(record.id, record.names)
        return True

    async def _opened(self, caller: Caller, record: Record, action: Action, deadline_s: float | None, request: Request | None) -> Record:
        """Submit the open of a record, unless that was done, and wait for it."""
        try:
            handle = caller.session.submit(_limited(action, deadline_s), record.open_id)
            calls.note(handle.id)
            await calls.wait(handle, cancel=not record.names, request=request)
            ends_at = None if record.lease_s is None else time.time() + record.lease_s
            record = record.model_copy(update={"state": "open", "ends_at": ends_at})
            if not await self._records.change(record):
                raise NotFound(f"environment {record.id} was closed while it was opened")
        except asyncio.CancelledError:
            if not record.names:
                await asyncio.shield(self._records.forget(record.id))
            raise
        except (GatewayError, TangramError, RedisError) as error:
            await self._records.forget(record.id, record.names)
            raise classify(error) from error
        return record

    async def _end(self, caller: Caller, record: Record) -> None:
        """Close an environment, whoever else does so too, and forget it."""
        try:
            await calls.run(caller, close_environment(record.place))
        except (NotFound, InfraFailed) as error:
            if isinstance(error, InfraFailed) and error.cause != "environment_lost":
                raise
        await self._records.forget(record.id, record.names)

    def _keep(self, environment: str, closing: Coroutine[Any, Any, None]) -> None:
        """Close an environment beside the calls; where that fails, it is tried again when its lease is over."""

        async def close() -> None:
            try:
                await closing
            except (TangramError, RedisError) as error:
                _log.warning("environment %s could not be closed and is left to its lease: %s", environment, error)
            finally:
                del self._closing[environment]

        self._closing[environment] = asyncio.create_task(close())

    async def _end_lease(self, environment: str) -> None:
        record = await self._records.read(environment)
        if record is None or record.ends_at is None:
            await self._records.forget(environment)
        elif record.ends_at <= time.time():
            _log.info("the lease of environment %s of job %s is over", record.id, record.job)
            await self._end(await self._sessions.caller(record.job), record)

    async def _has_images(self, image: str) -> bool:
        labels = await self._journal.labels()
        if labels and _CONTAINERS not in labels:
            _log.warning("no node has containers: image %s is a label only", image)
            return False
        return True


def _names(job: str, name: str, key: str | None) -> tuple[str, ...]:
    return tuple(name_key(job, kind, given) for kind, given in (("key", key), ("name", name)) if given)


def _action(record: Record) -> Action:
    requires = record.requires if record.opened_image is None else (*record.requires, _CONTAINERS)
    try:
        action = open_environment(
            record.job,
            trajectory=record.trajectory,
            image=record.opened_image,
            memory_mb=record.memory_mb,
            requires=requires,
            detached=True,
        )
        arguments: dict[str, Any] = {**action.arguments, "environment": record.id}
        return replace(action, environment=record.id, arguments=arguments, action_class=(record.image or record.template)[:256] or None)
    except TangramError as error:
        raise classify(error) from error


def _limited(action: Action, deadline_s: float | None) -> Action:
    return action if deadline_s is None else replace(action, queue_timeout_s=deadline_s)
