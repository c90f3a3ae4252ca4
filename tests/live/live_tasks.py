"""Tasks of a user: what `tangram worker cpu --include` names."""

from __future__ import annotations

import os
import time

from app.celery import app
from app.routing import action


@action(app, name="live.add", cores=[1, 2])
def add(x: int, y: int) -> int:
    return x + y


@action(app, name="live.cores", cores=[1, 2])
def cores() -> int:
    return int(cores.grant["units"])


@action(app, name="live.mark", cores=1, idempotent=True)
def mark(path: str, word: str, until: str = "") -> str:
    """Add a line to a file, and wait until another is there."""
    with open(path, "a") as file:
        file.write(f"{word} {os.getpid()}\n")
    while until and not os.path.exists(until):
        time.sleep(0.01)
    return word


@action(app, name="live.fail", cores=1)
def fail() -> None:
    raise ValueError("what nobody wants")
