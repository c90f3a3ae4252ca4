"""Looks into tables past all code under test."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from app.journal.database import writing
from app.journal.models import Base, Views


def empty(engine: Engine) -> None:
    """Delete all rows of all tables."""
    with writing(engine).begin() as connection:
        for table in Base.metadata.sorted_tables:
            connection.execute(table.delete())


def rows(engine: Engine, name: str) -> list[dict[str, Any]]:
    """Return all rows of the table or view `name`, in order of its key."""
    table = (Base.metadata.tables | Views.metadata.tables)[name]
    with engine.connect() as connection:
        return [dict(row._mapping) for row in connection.execute(table.select().order_by(*table.primary_key.columns))]


def row(engine: Engine, name: str) -> dict[str, Any]:
    """Return the only row of the table `name`."""
    (row,) = rows(engine, name)
    return row


def everything(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of all tables and views."""
    return {name: rows(engine, name) for name in (*Base.metadata.tables, *Views.metadata.tables)}
