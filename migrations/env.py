"""Run migrations: on the engine that `app.journal.database` hands over, else on `TANGRAM_DATABASE_URL`.

All steps of one call run in one transaction, and callers wait for one another, so that a scheduler and its
standby may both start with an upgrade.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, Engine, text

from app.journal.database import open_engine, sqlite_url, writing
from app.journal.models import Base
from tangram.settings import Settings

MIGRATION_LOCK = 0x7461_6E67
"""Key of PostgreSQL's advisory lock; any number that no other program uses in this database."""


def _engine() -> Engine:
    engine = context.config.attributes.get("engine")
    if isinstance(engine, Engine):
        return engine
    settings = Settings()
    return writing(open_engine(settings.database_url or sqlite_url(settings.state_dir / "tangram.sqlite")))


def _run(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
    context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True, transactional_ddl=True, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("migrations run on a live database only")
with _engine().begin() as live:
    _run(live)
