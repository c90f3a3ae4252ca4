"""Tokens: who calls, and for which job.

A token is 32 random bytes as text, shown once when it is made. The journal's database keeps its SHA-256 alone, which needs no salt:
nobody can guess 256 random bits. A process remembers what it has looked up for `CACHE_S`, so a revoked token counts that much longer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import secrets
import time
from collections.abc import Mapping

from sqlalchemy import ColumnElement, Engine, insert, select, update

from app.gateway.errors import InfraFailed, Unauthorized
from app.journal.database import DatabaseError, database_errors, writing
from app.journal.models import GatewayToken, table
from tangram.action import check_name

_log = logging.getLogger(__name__)

CACHE_S = 5.0
_MOST_CACHED = 10_000
_TOKENS = table(GatewayToken)


def make_token(engine: Engine, job: str) -> str:
    """Make a token for a job and return its text, which is kept nowhere.

    Raises `InvalidAction` when `job` is no valid name; `DatabaseError` when it cannot be written down.
    """
    check_name("job", job)
    token = secrets.token_urlsafe(32)
    row = {"hash": _hash(token), "job": job, "created_at": time.time()}
    with database_errors(engine.url), writing(engine).begin() as connection:
        connection.execute(insert(_TOKENS).values(row))
    return token


def revoke_tokens(engine: Engine, job: str) -> int:
    """Revoke all tokens of a job and return how many there were. Raises as `make_token`."""
    check_name("job", job)
    statement = update(_TOKENS).where(_TOKENS.c.job == job, _TOKENS.c.revoked_at.is_(None)).values(revoked_at=time.time())
    with database_errors(engine.url), writing(engine).begin() as connection:
        return connection.execute(statement).rowcount


class Tokens:
    """Says whose tokens there are; used by one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, tuple[float, str | None]] = {}
        self._jobs: dict[str, tuple[float, str | None]] = {}

    async def job_of(self, token: str) -> str:
        """Return the job of a token.

        Raises `Unauthorized` when there is no such token, or it was revoked; `InfraFailed` when the database cannot be asked.
        """
        hashed = _hash(token)
        job = await self._remembered(self._known, hashed, _TOKENS.c.hash == hashed)
        if job is None:
            raise Unauthorized("the token is unknown or was revoked")
        return job

    async def check(self, job: str) -> None:
        """Raise `Unauthorized` when a job has no token that counts: what was handed out to it counts no more then. Raises `InfraFailed`."""
        if await self._remembered(self._jobs, job, _TOKENS.c.job == job) is None:
            raise Unauthorized("the tokens of the job were revoked")

    async def _remembered(self, known: dict[str, tuple[float, str | None]], key: str, condition: ColumnElement[bool]) -> str | None:
        """Return the job of a token that fits and counts, as it was at most `CACHE_S` ago."""
        now, found = time.monotonic(), known.get(key)
        if found is None or found[0] <= now:
            try:
                found = now + CACHE_S, await asyncio.to_thread(self._look_up, condition)
            except DatabaseError as error:
                _log.warning("tokens cannot be looked up: %s", error)  # with the address, which is nothing for callers
                raise InfraFailed("tokens cannot be looked up", "stack_unreachable") from error
            if len(known) >= _MOST_CACHED:
                known.clear()
            known[key] = found
        return found[1]

    def _look_up(self, condition: ColumnElement[bool]) -> str | None:
        found = select(_TOKENS.c.job).where(condition, _TOKENS.c.revoked_at.is_(None)).limit(1)
        with database_errors(self._engine.url), self._engine.connect() as connection:
            job: str | None = connection.execute(found).scalar_one_or_none()
        return job


def token_of(headers: Mapping[str, str]) -> str:
    """Return the token that a call came with: `X-API-Key`, `Authorization: Bearer`, or the password of `Authorization: Basic`.

    Clients that take nothing but a URL send the latter for `http://tangram:TOKEN@host:port`. Raises `Unauthorized` when there is none.
    """
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    token = headers.get("x-api-key", "")
    if not token and scheme.lower() == "bearer":
        token = rest.strip()
    if not token and scheme.lower() == "basic":
        try:
            token = base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            token = ""
    if not token:
        raise Unauthorized("a token is needed: X-API-Key or Authorization: Bearer (`tangram token new --job J` makes one)")
    return token


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
