"""What `status` and `top` show, read from the journal and from what the scheduler shows of itself."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from redis import RedisError
from sqlalchemy import Engine

from app.journal.database import open_latest, snapshot, sqlite_url
from app.journal.figures import observations
from app.journal.overview import Document, Present, overview, read_present
from app.journal.recent import Recent
from app.journal.runs import load_run
from app.journal.status import status
from app.scheduler_document import problem_of, read_shown, silences_of
from scheduler.learning.durations import Observation
from tangram.connection import find_addresses, open_store
from tangram.errors import StackUnreachable, TangramError
from tangram.settings import Settings


def database_of(settings: Settings) -> str:
    """Return the journal's address: the setting, else that of the stack in the state folder, running or not.

    Raises `StackUnreachable` when there is neither.
    """
    if settings.database_url:
        return settings.database_url
    path = settings.state_dir / "tangram.sqlite"
    if not path.exists():
        raise StackUnreachable(
            f"there is no journal at {path}: start a stack with `tangram up`, "
            "or set TANGRAM_STATE_DIR or TANGRAM_DATABASE_URL to those of one that runs"
        )
    return sqlite_url(path)


def open_journal(settings: Settings) -> Engine:
    """Open the journal's database, which must be up to date. Raises as `database_of`, and `DatabaseError`."""
    return open_latest(database_of(settings), connect_timeout_s=settings.connect_timeout_s)


def read_state(settings: Settings) -> tuple[dict[str, Any], str]:
    """Return the state of the deployment as a JSON-able document, and the problem of `_shown`.

    `scheduler` is null where none shows itself, or where that cannot be read.
    """
    engine = open_journal(settings)
    document = asdict(status(engine, time.time()))
    engine.dispose()
    scheduler, _, problem = _shown(settings)
    return {"scheduler": scheduler, **document}, problem


class Overviews:
    """Reads the overview of the live page again and again."""

    def __init__(self, settings: Settings) -> None:
        """Open the journal. Raises as `open_journal`."""
        self._settings = settings
        self._engine = open_journal(settings)
        self._recent = Recent()

    def read(self) -> tuple[Document, str]:
        """Return the overview as it is now, and the problem of `_shown`."""
        now = time.time()
        with snapshot(self._engine) as connection:
            present = read_present(connection, now)
            self._recent.read(connection, now)
        scheduler, silent_s, problem = _shown(self._settings, present)
        return overview(present, self._recent, scheduler, silent_s), problem


def _shown(settings: Settings, present: Present | None = None) -> tuple[dict[str, Any] | None, dict[str, float | None], str]:
    """Return what the scheduler shows of itself, how long the clients of `present` are silent, and what is wrong with the result store."""
    try:
        with open_store(find_addresses(settings).result_url, settings.connect_timeout_s) as store:
            problem = problem_of(store)
            return read_shown(store, settings.shards), {} if problem or present is None else silences_of(store, present), problem
    except (StackUnreachable, RedisError, OSError) as error:
        return None, {}, f"the result store cannot be read: {error}"


def read_history(settings: Settings, run: str) -> list[Observation]:
    """Return the actions of a run that succeeded. Raises `TangramError` when the journal knows no such run, or none of its actions."""
    engine = open_journal(settings)
    found = observations(engine, of_run=load_run(engine, run))
    if not found:
        raise TangramError(f"no action of run {run!r} has succeeded, so there is nothing to learn from it")
    return found
