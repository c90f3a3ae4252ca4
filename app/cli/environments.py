"""What `tangram envs` shows: the environments that have not ended, and which of them may have nobody any more."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from redis import RedisError

from app.cli.consoles import Figures, make_console
from app.cli.output import print_json
from app.cli.state import open_journal
from app.journal.environments import environments
from tangram.connection import find_addresses, open_store
from tangram.errors import StackUnreachable
from tangram.life_signs import silences
from tangram.settings import Settings

_FILE_WIDTH = 200
"""Columns of a table that goes to a file or to another command."""


def read_environments(settings: Settings, *, job: str | None, orphans: bool) -> list[dict[str, Any]]:
    """Return the environments that have not ended as JSON-able objects; with `orphans`, only those.

    Raises `StackUnreachable` when there is no journal, or when the result store, which knows the clients' signs of life, does not answer.
    """
    engine = open_journal(settings)
    store = open_store(find_addresses(settings).result_url, settings.connect_timeout_s)

    def silent_s(clients: Sequence[str]) -> Mapping[str, float | None]:
        try:
            return silences(store, clients) if clients else {}
        except (RedisError, OSError) as error:
            raise StackUnreachable(f"the result store does not answer: {error}") from None

    found = environments(engine, time.time(), silent_s, job=job, lease_s=settings.lease_s)
    engine.dispose()
    return [asdict(one) for one in found if one.orphan or not orphans]


def show_environments(found: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Show environments."""
    if as_json:
        print_json({"environments": list(found)})
        return
    console = make_console()
    if not found:
        console.print("no environments")
        return
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = make_console(width=_FILE_WIDTH)
    table = Figures(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("environment", no_wrap=True)
    for column in ("job", "trajectory", "owner", "node", "state"):
        table.add_column(column, overflow="fold")
    for column in ("age s", "lease s", "runs"):
        table.add_column(column, justify="right", no_wrap=True)
    orphans = any(one["orphan"] for one in found)
    if orphans:
        table.add_column("orphan", overflow="fold")
    for one in found:
        left = one["lease_left_s"]
        texts = (one["id"], one["job"], one["trajectory"], one["owner"], one["node"], one["state"])
        numbers = (f"{one['age_s']:.0f}", "" if left is None else f"{left:.0f}", str(len(one["running"])))
        table.add_row(*texts, *numbers, *([one["orphan"]] if orphans else []))
    console.print(table)
