"""The scheduler's lock: a lease in SQL with a fencing token, so that one scheduler is active and a standby takes over.

| the lease is | `acquire` | `renew` | `release` |
|---|---|---|---|
| free or run out | ours: the epoch grows by one | refused | nothing |
| ours | prolonged, same epoch | prolonged | free |
| another's | refused | refused | nothing |

The *epoch* is the fencing token: it grows by one at each change of holder and travels with every grant. So a
worker can turn down a scheduler that slept through the end of its lease. Each step is one transaction that locks
the row (PostgreSQL) or the database (SQLite). Times are seconds since the epoch by the callers' clocks.

A holder need not ask the database before each write. For `SURE` of its lasting time after it was taken or prolonged, the lease is surely
ours: nobody takes it before it runs out. Clocks that differ by more than the rest of its lasting time would have a standby see it run out
while its holder is sure. So who is `patient` takes it only if it has seen no change of it for as long, by its own clock. A time in which
it could not look, as while the database was away, does not count: the holder has time to prolong the lease. Where looks are always that
far apart, since the database is slow, the time between two of them counts. `bind` has PostgreSQL end a transaction whose holder stands
still for as long. SQLite lets nobody take the lease while somebody writes.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import uuid

from sqlalchemy import Connection, Engine, bindparam, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from app.journal.database import database_errors, writing
from app.journal.models import LeaseRow, table
from tangram import clock

log = logging.getLogger(__name__)

SCHEDULER_LEASE = "scheduler"
SHARDS_LEASE = "shards"
"""Held by all schedulers of one number of shards together, whether they lead or stand by: the number is the holder."""

NOBODY = ""
SURE = 0.4
"""The part of its lasting time for which a lease is surely held. It is prolonged after half of that."""

LONGEST_MS = 2**31 - 1
"""The longest limit that PostgreSQL takes on a transaction that stands still."""

_ROW = select(LeaseRow.holder, LeaseRow.epoch, LeaseRow.expires_at).where(LeaseRow.name == bindparam("lease"))
_LOCKED, _HELD = _ROW.with_for_update(), _ROW.with_for_update(read=True)
_IDLE = text("SELECT set_config('idle_in_transaction_session_timeout', :most, false)")
_UNLIMITED = text("SELECT set_config('idle_in_transaction_session_timeout', '0', true)")
_TAKE = update(table(LeaseRow)).where(LeaseRow.name == bindparam("lease"))
_CHANGE = _TAKE.where(LeaseRow.holder == bindparam("held_by"), LeaseRow.epoch == bindparam("held_epoch"))


def holder_name() -> str:
    """Return a name for this process as a holder that no other process, past or present, has."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Lease:
    """The lease `name` as `holder` sees it. `holder` names one process and no other (`holder_name`), but for `SHARDS_LEASE`."""

    def __init__(self, engine: Engine, name: str, holder: str, ttl_s: float, *, patient: bool = False) -> None:
        """Take nothing yet; `ttl_s` is how long the lease lasts without `renew`. Who is not `patient` trusts all clocks."""
        if not holder:
            raise ValueError("a lease needs the name of its holder")
        self.name = name
        self.holder = holder
        self.ttl_s = ttl_s
        self.epoch: int | None = None
        self._engine = writing(engine)
        self._sure_from = (0.0, 0.0)
        self._patient = patient
        self._seen: tuple[tuple[str, int, float] | None, float] = (None, 0.0)
        """What the lease was when it was looked at last, and since when it is that."""
        self._looked_at, self._was_late = math.inf, False

    def acquire(self, now: float) -> int | None:
        """Take the lease where it is free, run out or ours; return the epoch, None where another holds it.

        Raises `DatabaseError` when the database cannot be reached or written; nobody knows then who holds the lease.
        """
        began = clock.monotonic()
        with database_errors(self._engine.url):
            try:
                with self._engine.begin() as connection:
                    self.epoch = self._acquire(connection, now)
            except IntegrityError:
                # Two contenders inserted the very first row at once and this one came second: there is a row now.
                return self.acquire(now)
        self._sure_from = (now, began)
        return self.epoch

    def renew(self, now: float) -> bool:
        """Prolong the lease to `now + ttl_s`; say whether it is still ours. Raises as `acquire`."""
        began = clock.monotonic()
        prolonged = self._change(expires_at=now + self.ttl_s)
        self._sure_from = (now, began)
        if not prolonged:
            self.epoch = None
        return prolonged

    def release(self) -> None:
        """Give the lease back where it is ours, so that a standby need not wait for its end. Raises as `acquire`."""
        self._change(holder=NOBODY, expires_at=0.0)
        self.epoch = None

    def bind(self, connection: Connection) -> None:
        """Have transactions of a fresh connection end that stand still for so long that `is_sure` would not hold any more."""
        if connection.dialect.name == "postgresql":
            # PostgreSQL takes 0 for no limit.
            most_ms = max(1, int(min(SURE * self.ttl_s * 1000, LONGEST_MS)))
            with connection.begin():
                connection.execute(_IDLE, {"most": f"{most_ms}ms"})

    def let_stand(self, connection: Connection) -> None:
        """Lift that limit for the transaction that has begun, which reads only: what it has read may take long to make sense of."""
        if connection.dialect.name == "postgresql":
            connection.execute(_UNLIMITED)

    def keep(self) -> None:
        """Prolong the lease before it might be another's, where it is ours. Raises as `acquire`."""
        if not self.is_sure:
            self.renew(clock.time())

    @property
    def last_seen_holder(self) -> str:
        """Who held the lease when this looked at it last; see `acquire`."""
        return NOBODY if self._seen[0] is None else self._seen[0][0]

    @property
    def is_sure(self) -> bool:
        """Whether the lease is ours without a look at the database, and stays so for another `SURE` of its lasting time."""
        # One clock may be set, the other stands still with the machine.
        passed_s = (clock.time() - self._sure_from[0], clock.monotonic() - self._sure_from[1])
        return self.epoch is not None and min(passed_s) >= 0.0 and max(passed_s) < SURE * self.ttl_s

    def held_in(self, connection: Connection) -> bool:
        """Say whether the lease is still ours, and keep it so until the transaction of `connection` ends."""
        row = connection.execute(_HELD, {"lease": self.name}).one_or_none()
        return row is not None and self.epoch is not None and (row.holder, row.epoch) == (self.holder, self.epoch)

    def _acquire(self, connection: Connection, now: float) -> int | None:
        row = connection.execute(_LOCKED, {"lease": self.name}).one_or_none()
        if row is None:
            connection.execute(insert(LeaseRow).values(name=self.name, holder=self.holder, epoch=1, expires_at=now + self.ttl_s))
            return 1
        has_stood = self._has_stood((row.holder, row.epoch, row.expires_at))
        if row.holder not in (self.holder, NOBODY) and (row.expires_at > now or not has_stood):
            return None
        epoch: int = row.epoch if row.holder == self.holder else row.epoch + 1
        connection.execute(_TAKE, {"lease": self.name, "holder": self.holder, "epoch": epoch, "expires_at": now + self.ttl_s})
        return epoch

    def _has_stood(self, found: tuple[str, int, float]) -> bool:
        """Say whether its holder has not prolonged the lease for so long that it is not sure of it any more.

        Who has not looked for as long begins to count anew: nobody could prolong it while the database was away. A second such time in a
        row counts: nobody looks oftener then.
        """
        now = clock.monotonic()
        passed_s, was_late = now - self._looked_at, self._was_late
        self._looked_at, self._was_late = now, passed_s > SURE * self.ttl_s
        if found != self._seen[0]:
            self._seen = (found, now)
        elif self._patient and self._was_late and not was_late:
            log.warning("lease %r could not be looked at for %.1f s: its holder has time to prolong it", self.name, passed_s)
            self._seen = (found, now)
        return not self._patient or now - self._seen[1] >= SURE * self.ttl_s

    def _change(self, **values: str | float) -> bool:
        if self.epoch is None:
            return False
        ours = {"lease": self.name, "held_by": self.holder, "held_epoch": self.epoch}
        with database_errors(self._engine.url), self._engine.begin() as connection:
            return connection.execute(_CHANGE, {**ours, **values}).rowcount == 1
