"""The pages. Each is rendered once per look, however many viewers have it open.

A page whose own questions took long is kept for further looks, so that it asks for at most `LOOKING_FRACTION` of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from sqlalchemy import Connection

from app.journal.database import DatabaseError, Unaskable
from app.journal.detail import action_detail, commands_of, environment_detail, job_detail, node_detail, service_detail
from app.journal.environments import lease_left
from app.journal.listing import (
    ACTION_STATES,
    ENVIRONMENT_STATES,
    ORDERS,
    ActionFilter,
    count_actions,
    known_jobs,
    list_actions,
    list_environments,
    sort_of,
)
from app.journal.waits import share_words
from app.web.formats import address, clock, counted, draining, megabytes, number, percent, quota_state, seconds, state_class
from app.web.shared_looks import LOOKING_FRACTION, Look, Looks
from tangram.ends import CAUSES

router = APIRouter()

MOST_PAGES: Final = 500
"""Pages that are kept of one look."""

MOST_TEXT: Final = 256
LAST_PAGE: Final = 2000

_FILTERS = (seconds, clock, counted, number, percent, megabytes, address, state_class, quota_state, draining, share_words)

Found = Mapping[str, Any] | None
Question = Callable[[Connection, Look], Found]
Timed = tuple[Found, float]
Ask = Callable[[Callable[[Connection], Timed]], Awaitable[Timed]]


@dataclass(slots=True)
class _Kept:
    """A page of one look; it may be shown until `until` (`time.monotonic`), and with further looks if that is later."""

    version: int
    until: float = 0.0
    page: asyncio.Task[Response] = field(init=False)


class Pages:
    """Renders pages, and keeps those of the latest look, and those that took long."""

    def __init__(self, looks: Looks, *, may_act: bool) -> None:
        self._looks = looks
        self._may_act = may_act
        self._templates = make_templates()
        self._kept: dict[str, _Kept] = {}

    async def of_look(self, request: Request, template: str) -> Response:
        """Return the page of a template that shows what the look itself has seen."""
        return await self._page(request, template, None)

    async def page(self, request: Request, template: str, question: Question) -> Response:
        """Return the page of a template with what `question` finds about one thing; 404 where that is None."""
        return await self._page(request, template, question, self._looks.ask)

    async def search(self, request: Request, template: str, question: Question) -> Response:
        """Return the page of a template with what `question` finds, which may read much of the journal."""
        return await self._page(request, template, question, self._looks.search)

    async def _page(self, request: Request, template: str, question: Question | None, ask: Ask | None = None) -> Response:
        look = await self._looks.now()
        key = f"{request.url.path}?{request.url.query}"
        kept = self._kept.get(key)
        if kept is None or not self._shows(kept, look):
            self._kept = {name: one for name, one in self._kept.items() if self._shows(one, look)}
            if len(self._kept) >= MOST_PAGES:
                self._kept = {}
            kept = self._kept[key] = _Kept(look.version)
            kept.page = asyncio.create_task(self._make(kept, request, look, template, question, ask))
        return await asyncio.shield(kept.page)

    def _shows(self, kept: _Kept, look: Look) -> bool:
        """Say whether a page is of the look, is still being made, or took so long that it serves further looks."""
        return kept.version == look.version or not kept.page.done() or time.monotonic() < kept.until

    async def _make(self, kept: _Kept, request: Request, look: Look, template: str, question: Question | None, ask: Ask | None) -> Response:
        if look.overview is None:
            return self._render("problem.html", look, {"problem": look.problem, "path": request.url.path}, 503)
        found: Found = {"notices": look.notices, "resolved": look.resolved}
        if question is not None and ask is not None:
            try:
                found, took_s = await ask(lambda connection: _timed(question, connection, look))
            except Unaskable:
                return self.missing(look, request.url.path)
            except DatabaseError as error:
                return self._render("problem.html", look, {"problem": str(error), "path": request.url.path}, 503)
            kept.until = time.monotonic() + took_s / LOOKING_FRACTION
        if found is None:
            return self.missing(look, request.url.path)
        return await asyncio.to_thread(self._render, template, look, {"path": request.url.path, **found})

    def missing(self, look: Look, path: str) -> Response:
        """Return the page for what the journal does not know."""
        return self._render("missing.html", look, {"path": path}, 404)

    def refused(self, look: Look, path: str, problems: Sequence[tuple[str, str]]) -> Response:
        """Return the page for an address with values, by name, that make no sense."""
        return self._render("refused.html", look, {"path": path, "problems": problems}, 422)

    def _render(self, template: str, look: Look, values: Mapping[str, Any], status: int = 200) -> Response:
        words = {"look": look, "now": look.at, "overview": look.overview, "may_act": self._may_act, **values}
        return HTMLResponse(self._templates.get_template(template).render(words), status)


def make_templates() -> Environment:
    """Return the environment of the templates, with the filters that they use; everything that they print is escaped."""
    templates = Environment(
        loader=PackageLoader("app.web"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters.update({one.__name__: one for one in _FILTERS})
    templates.globals.update(ACTION_STATES=ACTION_STATES, ENVIRONMENT_STATES=ENVIRONMENT_STATES, number=number, megabytes=megabytes)
    return templates


def _timed(question: Question, connection: Connection, look: Look) -> Timed:
    began = time.monotonic()
    return question(connection, look), time.monotonic() - began


def pages_of(request: Request) -> Pages:
    """Return what renders the pages."""
    pages: Pages = request.app.state.pages
    return pages


async def not_found(request: Request, _error: Exception) -> Response:
    """Answer for paths that nobody serves."""
    return pages_of(request).missing(await request.app.state.looks.now(), request.url.path)


async def not_understood(request: Request, error: Exception) -> Response:
    """Answer for addresses whose values cannot be understood: with a page, to a program with JSON."""
    assert isinstance(error, RequestValidationError)
    if "text/html" not in request.headers.get("accept", ""):
        return await request_validation_exception_handler(request, error)
    problems = [(str(one["loc"][-1]), str(one["msg"])) for one in error.errors()]
    return pages_of(request).refused(await request.app.state.looks.now(), request.url.path, problems)


Text = Annotated[str, Query(max_length=MOST_TEXT)]
PageNumber = Annotated[int, Query(ge=0, le=LAST_PAGE)]
Order = Annotated[str, Query(pattern=f"^(-?({'|'.join(ORDERS)}))?$")]
Hours = Annotated[float, Query(gt=0, le=24 * 366)]


@router.get("/")
async def cluster(request: Request) -> Response:
    """Show the cluster."""
    return await pages_of(request).of_look(request, "cluster.html")


@router.get("/actions")
async def actions(
    request: Request,
    job: Text = "",
    kind: Text = "",
    state: Text = "",
    fault: Text = "",
    node: Text = "",
    service: Text = "",
    environment: Text = "",
    trajectory: Text = "",
    q: Text = "",
    hours: Hours = 1.0,
    sort: Order = "",
    page: PageNumber = 0,
) -> Response:
    """List actions by filters."""
    words = {"job": job, "kind": kind, "state": state, "fault": fault, "node": node, "service": service}
    words |= {"environment": environment, "trajectory": trajectory, "q": q.strip(), "sort": sort}
    recent = request.app.state.looks.recent
    wanted = ActionFilter(**words, within_s=hours * 3600.0)

    def question(connection: Connection, look: Look) -> Found:
        listed = list_actions(connection, wanted, page, look.at)
        queue = look.overview["queue"] if look.overview else ()
        kinds = {group["kind"] for group in queue} | {ended.kind for ended in recent} | {row.kind for row in listed.rows} | {kind}
        given = {**words, "hours": f"{hours:g}"}
        return {
            "listed": listed,
            "wanted": wanted,
            "hours": hours,
            "page": page,
            "page_link": _page_link(given),
            "sort_link": lambda by: "?" + urlencode({**{name: value for name, value in given.items() if value}, "sort": by}),
            "total": count_actions(connection, wanted, look.at),
            "commands": commands_of(connection, [row.id for row in listed.rows]),
            "jobs": sorted({*known_jobs(connection), job} - {""}),
            "kinds": sorted(kinds - {""}),
        }

    return await pages_of(request).search(request, "actions.html", question)


@router.get("/search")
async def search(request: Request, q: Text = "") -> Response:
    """Lead to what is called so; where nothing is, to the actions and environments that have the words in their names or reasons."""
    name = q.strip()
    try:
        sort = await request.app.state.looks.ask(lambda connection: sort_of(connection, name))
    except DatabaseError:
        sort = ""
    if sort not in ("", "trajectory"):
        return RedirectResponse(address(name, sort), 303)
    return RedirectResponse("/actions?" + urlencode({sort or "q": name, "hours": 24}), 303)


@router.get("/oldest")
async def oldest(request: Request, job: Text = "", kind: Text = "") -> Response:
    """Lead to the action of a job and a kind that has waited longest; to their list where none waits any more."""
    wanted = ActionFilter(job=job, kind=kind, state="waiting")
    try:
        found = await request.app.state.looks.ask(lambda connection: list_actions(connection, wanted, 0, time.time()).rows)
    except DatabaseError:
        found = ()
    query = urlencode({"state": "waiting", "job": job, "kind": kind})
    return RedirectResponse(address(found[0].id, "action") if found else f"/actions?{query}", 303)


def _page_link(words: Mapping[str, str]) -> Callable[[int], str]:
    """Return what makes the address of another page of the same list."""
    given = {name: value for name, value in words.items() if value}
    return lambda page: "?" + urlencode({**given, "page": page})


@router.get("/actions/{action_id:path}")
async def action(request: Request, action_id: str) -> Response:
    """Show an action."""

    def question(connection: Connection, look: Look) -> Found:
        detail = action_detail(connection, action_id, look.scheduler, look.at)
        return None if detail is None else {"detail": detail, "row": detail.row, "cause": CAUSES.get(detail.row.cause)}

    return await pages_of(request).page(request, "action.html", question)


@router.get("/jobs/{name:path}")
async def job(request: Request, name: str) -> Response:
    """Show a job."""

    def question(connection: Connection, look: Look) -> Found:
        detail = job_detail(connection, name, request.app.state.looks.recent, look.at)
        jobs = (look.overview or {}).get("jobs", ())
        return None if detail is None else {"detail": detail, "job": next((one for one in jobs if one["name"] == name), None)}

    return await pages_of(request).page(request, "job.html", question)


@router.get("/environments")
async def environments(request: Request, job: Text = "", state: Text = "", q: Text = "", page: PageNumber = 0) -> Response:
    """List environments by filters."""
    words = {"job": job, "state": state, "q": q.strip()}

    def question(connection: Connection, look: Look) -> Found:
        listed = list_environments(connection, job, state, words["q"], page, look.at)
        return {"listed": listed, **words, "page": page, "page_link": _page_link(words)}

    return await pages_of(request).search(request, "environments.html", question)


@router.get("/environments/{environment_id:path}")
async def environment(request: Request, environment_id: str) -> Response:
    """Show an environment."""

    def question(connection: Connection, look: Look) -> Found:
        detail = environment_detail(connection, environment_id)
        if detail is None:
            return None
        left_s = lease_left(detail.row, look.at, (look.scheduler or {}).get("lease_s"), is_used=detail.is_used)
        return {"row": detail.row, "actions": detail.actions, "lease_left_s": left_s}

    return await pages_of(request).page(request, "environment.html", question)


@router.get("/services/{name:path}")
async def service(request: Request, name: str) -> Response:
    """Show a service."""

    def question(connection: Connection, look: Look) -> Found:
        detail = service_detail(connection, name, look.at)
        return None if detail is None else {"detail": detail}

    return await pages_of(request).page(request, "service.html", question)


@router.get("/nodes/{name:path}")
async def node(request: Request, name: str) -> Response:
    """Show a node."""

    def question(connection: Connection, look: Look) -> Found:
        detail = node_detail(connection, name, look.at)
        nodes = (look.overview or {}).get("nodes", ())
        return None if detail is None else {"detail": detail, "node": next((one for one in nodes if one["name"] == name), None)}

    return await pages_of(request).page(request, "node.html", question)


@router.get("/health")
@router.head("/health")
async def health(request: Request) -> Response:
    """Show what needs attention, and how the scheduler is."""
    return await pages_of(request).of_look(request, "health.html")
