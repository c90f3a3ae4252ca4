"""Opening the database: engines for SQLite and PostgreSQL, the revision that it must be at, and errors in one line.

Only what is the same for every table lives here. Both databases run explicit transactions. What a
writer has read cannot change before it writes: on SQLite it begins with `BEGIN IMMEDIATE` (see `writing`), on PostgreSQL row
locks see to that.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from tangram.errors import TangramError

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
BUSY_TIMEOUT_S = 5.0
READ_ONLY = "25006"
"""What PostgreSQL calls a write to a standby."""

MIB = 1 << 20
ACTION_BYTES = 700
"""What an action that has ended takes, with its grant and all indexes: 0.6 KB in SQLite (`make bench-week`), 0.7 KB in PostgreSQL."""


class DatabaseError(TangramError):
    """Raised when the database cannot be reached, read or written; the message is one line for a person."""


class Unaskable(DatabaseError):
    """Raised for a question with a value that no row can have: a text with a NUL in PostgreSQL, half of a surrogate pair, a huge number."""


def sqlite_url(path: Path) -> str:
    """Return the URL of the SQLite database in the file `path`."""
    return URL.create("sqlite", database=str(path.resolve())).render_as_string()


def open_engine(url: str, *, connect_timeout_s: float = 5.0) -> Engine:
    """Return an engine for `url`; the first use connects.

    Raises `DatabaseError` when the URL is malformed or names another database than SQLite or PostgreSQL.
    """
    with database_errors(url):
        parsed = _parsed(url)
        backend = parsed.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise DatabaseError(f"{shown(url)}: use sqlite:///… or postgresql+psycopg://…, not {backend}")
        # Compact JSON: the default separators add a tenth to every header.
        dumps = partial(json.dumps, separators=(",", ":"))
        if backend == "sqlite":
            engine = create_engine(parsed, json_serializer=dumps)
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        if "@" in (parsed.database or ""):  # with a part of the password
            raise DatabaseError("database URL: not a database URL: / and @ in a password are %2F and %40")
        # A host that vanished would block a commit for minutes.
        options = {"connect_timeout": max(1, round(connect_timeout_s)), "tcp_user_timeout": 4000}
        options |= {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3}
        # By default psycopg takes the server's encoding, and reads texts of an SQL_ASCII database as bytes.
        engine = create_engine(parsed, json_serializer=dumps, connect_args={**options, "client_encoding": "utf8"}, pool_pre_ping=True)
        event.listen(engine, "handle_error", _leave_standby)
        return engine


def writing(engine: Engine) -> Engine:
    """Return the same engine, its transactions begun for writing."""
    return engine.execution_options(tangram_begin="BEGIN IMMEDIATE")


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """Connect for questions that belong together: all of them see the database as it is at the first.

    Raises `Unaskable` when a question has a value that no row can have; `DatabaseError` when it cannot be reached or read.
    """
    with database_errors(engine.url), engine.connect() as connection:
        if engine.dialect.name == "postgresql":  # on SQLite a transaction always is one
            connection.execution_options(isolation_level="REPEATABLE READ")
        try:
            yield connection
        except (DataError, UnicodeEncodeError, OverflowError) as error:
            raise Unaskable("the database has no room for a value that was asked for") from error


def current_revision(engine: Engine) -> str | None:
    """Return the revision that the database is at; None for an empty one."""
    with database_errors(engine.url), engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        return found


def latest_revision() -> str:
    """Return the revision that this version of the code needs: the number that the last migration's file begins with.

    Alembic says the same, but importing it makes every command slower.
    """
    return max(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*_*.py"))


def sqlite_file(engine: Engine) -> Path | None:
    """Return the file of an SQLite database; None for other databases, one in memory, and one whose path is a URI."""
    path = engine.url.database or ""
    return Path(path) if engine.dialect.name == "sqlite" and path not in ("", ":memory:") and not path.startswith("file:") else None


def require_tables(engine: Engine) -> str:
    """Return the revision of a database. Raises `DatabaseError` when it cannot be reached or has no tables."""
    file = sqlite_file(engine)
    if file is not None and not file.exists():  # SQLite would make it
        raise DatabaseError(f"{shown(engine.url)}: there is no such file: run `tangram db upgrade`, which makes it")
    found = current_revision(engine)
    if found is None:
        raise DatabaseError(f"{shown(engine.url)}: the database has no tables: run `tangram db upgrade`")
    return found


def require_latest(engine: Engine) -> None:
    """Refuse a database that this version of the code cannot use.

    Raises `DatabaseError` when it cannot be reached or is at another revision.
    """
    found, needed = require_tables(engine), latest_revision()
    if found != needed:
        advice = "run `tangram db upgrade`" if found < needed else "a newer release wrote it, use that one"
        raise DatabaseError(f"{shown(engine.url)}: the database is at revision {found}, {needed} is needed: {advice}")


def open_latest(url: str, *, connect_timeout_s: float = 5.0) -> Engine:
    """Return an engine for a database that this version of the code can use. Raises as `open_engine` and `require_latest`."""
    engine = open_engine(url, connect_timeout_s=connect_timeout_s)
    try:
        require_latest(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def database_errors(url: str | URL, kind: type[DatabaseError] = DatabaseError) -> Iterator[None]:
    """Turn errors of SQLAlchemy and of its drivers into `kind`, with one line that names the database."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise kind(f"{shown(url)}: {problem(error)}") from error


def problem(error: BaseException) -> str:
    """Say in one line what a driver reported."""
    if isinstance(error, NoSuchModuleError | ArgumentError):
        return "not a database URL: use sqlite:///… or postgresql+psycopg://…"
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


def shown(url: str | URL) -> str:
    """Return `url` for messages: without its password."""
    try:
        return _parsed(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return "database URL"


def _parsed(url: str | URL) -> URL:
    try:
        return make_url(url)
    except ValueError as error:  # a port that is no number
        raise ArgumentError(str(error)) from error


def _prepare_sqlite(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    # With a write-ahead log, NORMAL survives the death of any process; only a power cut may take the last commits.
    _use_log(cursor)
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _use_log(cursor: sqlite3.Cursor) -> None:
    """Have a database use a write-ahead log. SQLite does not wait for whoever writes to a new one at that moment, so this does."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _leave_standby(context: ExceptionContext) -> None:
    """Give up all connections after a write to a server that only reads, as after a failover: a new one may find the primary."""
    if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("tangram_begin", "BEGIN"))


def size_mb(connection: Connection) -> float:
    """Return the size of the journal in MiB: of SQLite's file what is in use, on PostgreSQL as estimated from the number of actions.

    What is removed leaves room in PostgreSQL's files, which become no smaller.
    """
    if connection.dialect.name == "sqlite":
        pages = "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
        size = connection.execute(text(pages)).scalar_one()
    else:
        rows = text("SELECT coalesce(sum(n_live_tup), 0) FROM pg_stat_user_tables WHERE relid = 'actions'::regclass")
        size = int(connection.execute(rows).scalar_one()) * ACTION_BYTES
    return float(size) / MIB
