"""What the word RUN of the command line means: a run or a job of a journal.

`RUN` is the id of a replay, `last`, or the name of a job, in the journal of the settings. `PATH:RUN` is one of the SQLite journal at that
path. So runs of two stacks can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine, select

from app.cli.state import database_of
from app.journal.database import DatabaseError, database_errors, open_latest, sqlite_url
from app.journal.figures import Selection
from app.journal.models import Job
from app.journal.runs import RunRecord, load_run
from tangram.action import check_name
from tangram.errors import TangramError
from tangram.settings import Settings

_NAMED = 5
"""Jobs that are named where a name is not known."""

_JOURNALS = (".sqlite", ".sqlite3", ".db")
"""What names of files of journals end in; a job with such a name before a colon cannot be meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A run or, where `run` is absent, a job of the journal that `engine` opens; `name` is the run's id or the job's name."""

    name: str
    run: RunRecord | None
    engine: Engine

    @property
    def selection(self) -> Selection:
        """The actions that are meant."""
        return Selection.of_run(self.run) if self.run is not None else Selection(jobs=(self.name,))


@contextmanager
def chosen(settings: Settings, words: str) -> Iterator[Chosen]:
    """Find what `words` mean. Raises `TangramError` when the journal knows no such run and no such job, or cannot be read."""
    url, name = _journal_and_name(settings, words)
    check_name("RUN", name)
    engine = open_latest(url, connect_timeout_s=settings.connect_timeout_s)
    try:
        yield _find(engine, name)
    finally:
        engine.dispose()


def _journal_and_name(settings: Settings, words: str) -> tuple[str, str]:
    """Return the address of the journal, and the run in it. Names of jobs may have colons, and so may paths.

    Raises `TangramError` when the file of a journal is not there.
    """
    for at in (index for index, letter in enumerate(words) if letter == ":"):
        if Path(words[:at]).is_file():
            return sqlite_url(Path(words[:at])), words[at + 1 :]
        if Path(words[:at]).suffix in _JOURNALS:
            raise TangramError(f"there is no file {words[:at]}")
    return database_of(settings), words


def _find(engine: Engine, name: str) -> Chosen:
    try:
        run = load_run(engine, name)
    except DatabaseError:
        with database_errors(engine.url), engine.connect() as connection:
            if connection.execute(select(Job.name).where(Job.name == name)).first() is None:
                latest = connection.scalars(select(Job.name).order_by(Job.first_seen_at.desc()).limit(_NAMED)).all()
                known = f"its latest jobs are {', '.join(map(repr, latest))}" if latest else "it has no job yet"
                none = ": no replay has run yet, so name a job" if name == "last" else ""
                raise TangramError(f"the journal knows no run and no job {name!r}{none}; {known}") from None
        return Chosen(name=name, run=None, engine=engine)
    return Chosen(name=run.id, run=run, engine=engine)
