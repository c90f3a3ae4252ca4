"""Whether a process of a deployment does its work, asked from beside it: what the health check of a container runs.

A scheduler does when the lease in the journal is fresh, be it its own or that of the one it stands by for. A worker does
when it answers over the broker, which takes its connection and its loop. Whatever is wrong ends as a `TangramError`.
"""

from __future__ import annotations

import socket
import time
from typing import Literal

from sqlalchemy import select

from app.cli.state import database_of
from app.journal.database import database_errors, open_engine
from app.journal.leader import SCHEDULER_LEASE
from app.journal.models import LeaseRow
from tangram.errors import TangramError
from tangram.settings import Settings

ProcessKind = Literal["scheduler", "cpu", "gpu", "api"]
PROCESSES: tuple[ProcessKind, ...] = ("scheduler", "cpu", "gpu", "api")


class Unhealthy(TangramError):
    """Raised when a process does not do its work; the message is one line for a person."""


def check_health(process: ProcessKind, settings: Settings) -> str:
    """Return how the process of this host does that is meant by `process`.

    Raises `TangramError` when it does not do its work, or what it works with cannot be reached.
    """
    return _scheduler(settings) if process == "scheduler" else _worker(process, settings)


def _scheduler(settings: Settings) -> str:
    engine = open_engine(database_of(settings), connect_timeout_s=settings.connect_timeout_s)
    try:
        with database_errors(engine.url), engine.connect() as connection:
            lease = select(LeaseRow.holder, LeaseRow.epoch, LeaseRow.expires_at).where(LeaseRow.name == SCHEDULER_LEASE)
            row = connection.execute(lease).one_or_none()
    finally:
        engine.dispose()
    if row is None or row.expires_at < time.time():
        raise Unhealthy("no scheduler leads")
    return f"{row.holder.partition(':')[0]} leads, epoch {row.epoch}"


def _worker(process: ProcessKind, settings: Settings) -> str:
    from app.celery import make_app
    from app.reach import require_broker

    app = make_app(settings)
    require_broker(app, settings.connect_timeout_s)
    host = socket.gethostname()
    # As workers/start.py names the node, and Celery the worker of it.
    worker = f"{settings.node_name or f'{host}-{process}'}@{host}"
    if not app.control.ping(destination=[worker], timeout=settings.connect_timeout_s):
        raise Unhealthy(f"worker {worker} does not answer")
    return f"worker {worker} answers"
