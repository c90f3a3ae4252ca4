"""Bringing the database to a revision of its tables, by Alembic and the steps in `migrations/`.

Apart from the opening of databases, since what only reads or writes them has no need of Alembic.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Engine, inspect
from sqlalchemy.exc import OperationalError

from app.journal.database import MIGRATIONS, DatabaseError, database_errors, open_engine, problem, shown, sqlite_file, writing

log = logging.getLogger(__name__)

LONGEST_UPGRADE_S = 600.0

# Alembic keeps the migration that runs in module globals.
_ALEMBIC = threading.Lock()


def upgrade(url: str, revision: str = "head") -> bool:
    """Bring the database at `url` to `revision`; do nothing where it is there already. Return whether a file was made for it.

    Raises `DatabaseError` when it cannot be reached or written, is new and cannot hold every text, or is at a revision that is not in
    `migrations/`.
    """
    return _migrate(url, lambda config: command.upgrade(config, revision))


def downgrade(url: str, revision: str) -> None:
    """Take the database at `url` back to `revision`, `base` for an empty one. Raises as `upgrade`."""
    _migrate(url, lambda config: command.downgrade(config, revision))


def _migrate(url: str, step: Callable[[Config], None]) -> bool:
    engine = open_engine(url)
    try:
        with database_errors(url):
            _require_unicode(engine)
            is_new = _make_private(engine)
            config = _config()
            config.attributes["engine"] = writing(engine)
            with _ALEMBIC:
                _wait_for_others(url, lambda: step(config))
            return is_new
    except CommandError as error:
        unknown = "" if "locate revision" not in str(error) else "; another version wrote it: use that one, or another database"
        raise DatabaseError(f"{shown(url)}: {problem(error)}{unknown}") from error
    finally:
        engine.dispose()


def _wait_for_others(url: str, step: Callable[[], None]) -> None:
    """Take a step, which is one transaction. While another process writes to the SQLite database, try again for `LONGEST_UPGRADE_S`."""
    deadline = time.monotonic() + LONGEST_UPGRADE_S
    while True:
        try:
            return step()
        except OperationalError as error:
            if getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            log.warning("%s: another process writes to the database, perhaps an upgrade: waiting for it", shown(url))


def _require_unicode(engine: Engine) -> None:
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
            is_new = not inspect(connection).has_table("alembic_version")
        if is_new and encoding not in ("UTF8", "SQL_ASCII"):
            raise DatabaseError(f"{shown(engine.url)}: encoding {encoding} cannot hold every text: make a database with ENCODING 'UTF8'")


def _make_private(engine: Engine) -> bool:
    """Make the file of a new SQLite database for its owner alone, whoever may look into its folder; SQLite's other files are as it is.

    Return whether it was made.
    """
    if (file := sqlite_file(engine)) is not None:
        with suppress(OSError):  # it is there, or SQLite says what is wrong
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return True
    return False


def _config() -> Config:
    config = Config()
    # Alembic reads options with interpolation, where a bare % in a folder's name would be a syntax error.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
