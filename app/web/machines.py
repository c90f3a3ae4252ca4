"""How many machines: what was wanted beyond what is there, and what `tangram plan` says of the last hour, computed when somebody asks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from sqlalchemy import Connection

from app.journal.database import DatabaseError
from app.journal.demand import SLOTS, SORTS, Slot, demand
from app.journal.overview import Document
from app.web.pages import Found, Hours, pages_of
from app.web.shared_looks import Look

router = APIRouter()

PLAN_S: Final = 60.0
"""Seconds that a plan may take."""

AGAIN_S: Final = 60.0
"""Seconds for which an answer is not computed again, whoever asks."""


@dataclass(slots=True)
class LastHour:
    """The plan of the last hour: at most one is computed at a time, in a process of its own."""

    database_url: str
    began: float = 0.0
    answer: dict[str, Any] | None = None
    task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether it is being computed."""
        return self.task is not None and not self.task.done()

    def ask(self) -> None:
        """Have it computed, unless that is under way or was done a moment ago."""
        if not self.busy and time.time() > self.began + AGAIN_S:
            self.began = time.time()
            self.task = asyncio.create_task(self._compute())

    async def close(self) -> None:
        """End what is being computed."""
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task

    async def _compute(self) -> None:
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "app.planning.last_hour",
                env={**os.environ, "TANGRAM_DATABASE_URL": self.database_url},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as refused:  # the machine has no memory or no process left for it
            self.answer = {"problem": f"it could not be begun: {refused.strerror}"}
            return
        try:
            said, error = await asyncio.wait_for(child.communicate(), PLAN_S)
            last = error.decode(errors="replace").strip().splitlines()[-1:]
            self.answer = json.loads(said) if child.returncode == 0 else {"problem": "; ".join(last) or "it ended by itself"}
        except TimeoutError:
            what = f"it took longer than {PLAN_S:g} s; `tangram export JOB` and `tangram plan` take their time"
            self.answer = {"problem": what}
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()


def there(overview: Document) -> dict[str, float]:
    """Return what the nodes that are there offer."""
    nodes = [node for node in overview["nodes"] if node["state"] not in ("lost", "left")]
    return dict(zip(SORTS, (overview["cores"]["total"], overview["cells"]["total"], sum(node["memory_mb"] for node in nodes)), strict=True))


def machines_document(connection: Connection, overview: Document, hours: float, now: float) -> Document:
    """Return the document of the page and of `/api/machines`; the latest slot comes first."""
    offered = there(overview)

    def amounts(slot: Slot, sort: str) -> Document:
        return {"held": slot.held[sort], "waiting": slot.waiting[sort], "beyond": slot.beyond(sort, offered[sort])}

    slots = [
        {"start": slot.start, "end": slot.end, **{sort: amounts(slot, sort) for sort in SORTS}}
        for slot in reversed(demand(connection, hours, now))
    ]
    return {"hours": hours, "there": offered, "slots": slots}


@router.get("/machines")
async def machines(request: Request, hours: Hours = SLOTS / 4) -> Response:
    """Show what was wanted beyond what is there."""

    def question(connection: Connection, look: Look) -> Found:
        assert look.overview is not None  # without one there is no page
        return {**machines_document(connection, look.overview, hours, look.at), "plan": request.app.state.last_hour}

    return await pages_of(request).search(request, "machines.html", question)


@router.post("/machines/plan")
async def plan(request: Request) -> Response:
    """Have the plan of the last hour computed, and lead back."""
    request.app.state.last_hour.ask()
    return RedirectResponse("/machines#plan", 303)


@router.get("/api/machines")
async def api_machines(request: Request, hours: Hours = SLOTS / 4) -> JSONResponse:
    """Return what was wanted beyond what is there (docs/operating.md has the keys)."""
    looks = request.app.state.looks
    look: Look = await looks.now()
    overview = look.overview
    if overview is None:
        return JSONResponse({"error": look.problem}, 503)
    try:
        return JSONResponse(await looks.search(lambda connection: machines_document(connection, overview, hours, look.at)))
    except DatabaseError as error:
        return JSONResponse({"error": str(error)}, 503)
