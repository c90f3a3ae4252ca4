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
from app.journal.database import database_errors, open_engine, require_tables
from app.journal.leader import SCHEDULER_LEASE
from app.journal.models import LeaseRow
from app.local.embedded import StackFile
from app.own_container import node_name
from tangram.connection import read_stack_file
from tangram.errors import TangramError
from tangram.settings import Settings
from tangram.wire import of_shard

ProcessKind = Literal["scheduler", "cpu", "gpu", "api"]
PROCESSES: tuple[ProcessKind, ...] = ("scheduler", "cpu", "gpu", "api")


def check_health(process: ProcessKind, settings: Settings) -> str:
    """Return how the processes of this host do that are meant by `process`.

    Raises `TangramError` when it does not do its work, or what it works with cannot be reached.
    """
    return _scheduler(settings) if process == "scheduler" else _worker(process, settings)


def _scheduler(settings: Settings) -> str:
    engine = open_engine(database_of(settings), connect_timeout_s=settings.connect_timeout_s)
    try:
        require_tables(engine)  # an older version is well, too, where a newer one has been migrated to
        with database_errors(engine.url), engine.connect() as connection:
            of_its_shard = LeaseRow.name == of_shard(SCHEDULER_LEASE, settings.shard)
            lease = select(LeaseRow.holder, LeaseRow.epoch, LeaseRow.expires_at).where(of_its_shard)
            row = connection.execute(lease).one_or_none()
    finally:
        engine.dispose()
    if row is None or row.expires_at < time.time():
        raise TangramError("no scheduler leads" if settings.shards == 1 else f"no scheduler leads shard {settings.shard}")
    return f"{row.holder.partition(':')[0]} leads, epoch {row.epoch}"


def _worker(process: ProcessKind, settings: Settings) -> str:
    from app.celery import make_app
    from app.preconditions import require_broker

    workers = [f"{node}@{socket.gethostname()}" for node in _nodes(process, settings)]  # as Celery calls them
    app = make_app(settings)
    require_broker(app, settings.connect_timeout_s)
    answers = app.control.ping(destination=workers, timeout=settings.connect_timeout_s)
    if silent := set(workers).difference(*answers):
        raise TangramError(f"worker {', '.join(sorted(silent))} does not answer")
    return f"worker {', '.join(workers)} answers"


def _nodes(process: ProcessKind, settings: Settings) -> list[str]:
    """Return the names of the nodes that are meant: that of the settings, else those of `tangram up`, else the one that a worker makes."""
    if not settings.node_name and settings.broker_url is None and settings.stack_file.exists():
        names = read_stack_file(settings.stack_file, StackFile).pids
        if nodes := [name for name in names if name.startswith(f"{process}-")]:
            return nodes
        raise TangramError(f"the stack in {settings.state_dir} has no {process} node")
    return [node_name(process, settings)]
