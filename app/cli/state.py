"""What `status`, `top` and `report` show, read from the journal and from what the scheduler shows of itself."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from redis import RedisError

from app.journal.database import open_engine, require_latest, sqlite_url
from app.journal.figures import Selection, act_report, observations
from app.journal.runs import load_run
from app.journal.status import status
from scheduler.learning.durations import Observation
from tangram.connection import find_addresses, open_store
from tangram.errors import StackUnreachable, TangramError
from tangram.settings import Settings
from tangram.wire import SCHEDULER_KEY


def database_of(settings: Settings) -> str:
    """Return the journal's address: the setting, else that of the stack in the state folder, running or not.

    Raises
    ------
    StackUnreachable
        When there is neither.

    """
    if settings.database_url:
        return settings.database_url
    path = settings.state_dir / "tangram.sqlite"
    if not path.exists():
        raise StackUnreachable(f"there is no journal at {path}: set TANGRAM_DATABASE_URL or TANGRAM_STATE_DIR")
    return sqlite_url(path)


def read_state(settings: Settings) -> dict[str, Any]:
    """Return the state of the deployment as a JSON-able document; `scheduler` is null where none shows itself."""
    engine = open_engine(database_of(settings), connect_timeout_s=settings.connect_timeout_s)
    require_latest(engine)
    document = asdict(status(engine, time.time()))
    engine.dispose()
    scheduler = None
    with suppress(StackUnreachable, RedisError, OSError):
        shown = open_store(find_addresses(settings).result_url, settings.connect_timeout_s).get(SCHEDULER_KEY)
        scheduler = json.loads(shown) if isinstance(shown, bytes | str) else None
    return {"scheduler": scheduler, **document}


def read_report(settings: Settings, name: str) -> dict[str, Any]:
    """Return the ACT figures of a run, or of a job of that name.

    Raises
    ------
    TangramError
        When the journal knows neither.

    """
    engine = open_engine(database_of(settings), connect_timeout_s=settings.connect_timeout_s)
    require_latest(engine)
    try:
        run = load_run(engine, name)
    except TangramError:
        report = act_report(engine, Selection(jobs=(name,)))
        if not report.total.by_status:
            raise TangramError(f"the journal knows no run and no job {name!r}") from None
        return {"job": name, **asdict(report)}
    return {"run": asdict(run), **asdict(act_report(engine, Selection.of_run(run)))}


def read_history(settings: Settings, run: str) -> list[Observation]:
    """Return the actions of a run that succeeded. Raises `TangramError` when the journal knows no such run, or none of its actions."""
    engine = open_engine(database_of(settings), connect_timeout_s=settings.connect_timeout_s)
    require_latest(engine)
    found = observations(engine, of_run=load_run(engine, run))
    if not found:
        raise TangramError(f"no action of run {run!r} has succeeded, so there is nothing to learn from it")
    return found
