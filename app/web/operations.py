"""What a person may do on the page: cancel an action, close an environment, drain a node or put it back.

All need the token of `TANGRAM_WEB_TOKEN` in the header `Authorization`; without that setting the page is read-only. A header of one's
own cannot be sent by a form of another site, so the token also keeps forged requests out. The work is done by the same client that
trainers use, in the name of the job that the thing belongs to. A node belongs to none.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from concurrent.futures import wait
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from sqlalchemy import select

from app.journal.models import Action, Environment, Node
from app.web.shared_looks import Looks
from tangram.calls import Place, close_environment
from tangram.errors import TangramError
from tangram.session import Session
from tangram.settings import Settings

router = APIRouter()

NAME = "live page"

LOOK_S = 0.05
"""Seconds between two looks whether a message has gone."""


class Actor:
    """Sends what a person asks for. The session begins with the first request."""

    def __init__(self, settings: Settings, looks: Looks) -> None:
        self._settings = settings
        self._looks = looks
        self._session: Session | None = None
        self._one_start = asyncio.Lock()

    def refusal(self, authorization: str) -> JSONResponse | None:
        """Return the answer to who may not act."""
        token = self._settings.web_token
        if token is None:
            return JSONResponse({"error": "the page is read-only: TANGRAM_WEB_TOKEN is not set"}, 403)
        if not hmac.compare_digest(authorization.encode(), f"Bearer {token.get_secret_value()}".encode()):
            return JSONResponse({"error": "the token is wrong"}, 401, {"WWW-Authenticate": "Bearer"})
        return None

    async def cancel(self, action_id: str) -> JSONResponse:
        """Cancel an action that has not ended."""
        status = await self._looks.ask(
            lambda connection: connection.execute(select(Action.status).where(Action.id == action_id)).scalar_one_or_none()
        )
        if status is None:
            return JSONResponse({"error": "there is no such action"}, 404)
        if status not in ("waiting", "running"):
            return JSONResponse({"error": f"the action has ended: {status}"}, 409)
        return await self._do(lambda session: session.wait_for(session.cancel_task(action_id)), "the cancel is on its way")

    async def close_environment(self, environment_id: str) -> JSONResponse:
        """Close an environment that stands."""
        query = select(Environment.job, Environment.trajectory, Environment.state).where(Environment.id == environment_id)
        row = await self._looks.ask(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            return JSONResponse({"error": "there is no such environment"}, 404)
        if row.state in ("closing", "closed", "lost"):
            return JSONResponse({"error": f"the environment is {row.state}"}, 409)
        place = Place(row.job, row.trajectory, environment_id)
        return await self._do(lambda session: _close(session, place), "the environment is being closed")

    async def drain(self, name: str, *, draining: bool) -> JSONResponse:
        """Drain a node, or have it take actions again."""
        query = select(Node.draining).where(Node.name == name)
        known = await self._looks.ask(lambda connection: connection.execute(query).scalar_one_or_none())
        if known is None:
            return JSONResponse({"error": "there is no such node"}, 404)
        if known == draining:
            return JSONResponse({"error": "the node is draining already" if draining else "the node is not draining"}, 409)
        done = "the node is being drained" if draining else "the node is being put back"
        return await self._do(lambda session: session.wait_for(session.drain(name, draining=draining)), done)

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await asyncio.to_thread(self._session.stop)

    async def _do(self, send: Callable[[Session], None], done: str) -> JSONResponse:
        """Answer `done` once `send` returns, which it does when the broker has the message; what it raises is the answer otherwise."""
        try:
            async with self._one_start:
                if self._session is None:
                    self._session = await asyncio.to_thread(_connect, self._settings)
            await asyncio.to_thread(send, self._session)
        except TangramError as error:
            return JSONResponse({"error": str(error)}, 503)
        return JSONResponse({"done": done})


def _connect(settings: Settings) -> Session:
    """Return a session that bridges no outage: a person waits, and can press the button again."""
    session = Session(NAME, settings.model_copy(update={"outage_s": min(settings.outage_s, settings.connect_timeout_s)}))
    wait(session.start(), session.start_limit_s)
    session.check_started()
    return session


def _close(session: Session, place: Place) -> None:
    """Ask for the end of an environment. A close may take long, so this waits only until the broker has it."""
    closing = session.submit(close_environment(place))
    while not closing.future.done() and not session.is_with_broker(closing.id):
        wait([closing.future], LOOK_S)
    if closing.future.done():
        closing.future.result()


Authorization = Annotated[str, Header()]


@router.post("/actions/{action_id:path}/cancel")
async def cancel(request: Request, action_id: str, authorization: Authorization = "") -> JSONResponse:
    """Cancel an action."""
    actor: Actor = request.app.state.actor
    return actor.refusal(authorization) or await actor.cancel(action_id)


@router.post("/environments/{environment_id:path}/close")
async def close(request: Request, environment_id: str, authorization: Authorization = "") -> JSONResponse:
    """Close an environment."""
    actor: Actor = request.app.state.actor
    return actor.refusal(authorization) or await actor.close_environment(environment_id)


@router.post("/nodes/{name:path}/drain")
async def drain(request: Request, name: str, authorization: Authorization = "") -> JSONResponse:
    """Drain a node."""
    actor: Actor = request.app.state.actor
    return actor.refusal(authorization) or await actor.drain(name, draining=True)


@router.post("/nodes/{name:path}/undrain")
async def undrain(request: Request, name: str, authorization: Authorization = "") -> JSONResponse:
    """Have a node take actions again."""
    actor: Actor = request.app.state.actor
    return actor.refusal(authorization) or await actor.drain(name, draining=False)
