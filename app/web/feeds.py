"""What scripts read: the overview and the timeline as JSON, and an event for each new look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from app.web.shared_looks import Looks

router = APIRouter()

RETRY_MS = 2000
"""Milliseconds after which a browser connects again."""


@router.get("/events")
async def events(request: Request) -> StreamingResponse:
    """Send an event `look` with its version for each new look, until the viewer leaves."""
    return StreamingResponse(_follow(request, request.app.state.looks), media_type="text/event-stream")


async def _follow(request: Request, looks: Looks) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MS}\n\n"
    version = (await looks.now()).version
    while not await request.is_disconnected():
        yield f"event: look\ndata: {version}\n\n"
        version = (await looks.after(version)).version


@router.get("/api/overview")
async def api_overview(request: Request) -> JSONResponse:
    """Return the overview (docs/operating.md has its keys)."""
    look = await request.app.state.looks.now()
    if look.overview is None:
        return JSONResponse({"error": look.problem}, 503)
    return JSONResponse(look.overview)


@router.get("/api/timeline")
async def api_timeline(request: Request, since: Annotated[int, Query(ge=0)] = 0) -> Response:
    """Return the bars of the timeline that changed after version `since` (`app/journal/lanes.py`)."""
    looks: Looks = request.app.state.looks
    await looks.now()
    return JSONResponse(await asyncio.to_thread(looks.timeline, since))


@router.get("/ready")
@router.head("/ready")
async def ready(request: Request) -> JSONResponse:
    """Say whether the journal can be read."""
    look = await request.app.state.looks.now()
    return JSONResponse(
        {"status": "not ready", "reason": look.problem} if look.problem else {"status": "ready"}, 503 if look.problem else 200
    )
