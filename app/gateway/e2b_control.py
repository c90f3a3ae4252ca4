"""E2B's control plane: sandboxes are environments, their timeouts are leases.

A sandbox is made from what its `templateID` names: a template (`e2b_templates.py`), an image, or `base`, which is an environment without
an image. Metadata under `IMAGE_KEY` names an image too, for clients that cannot name a template. Where no node has containers, image and
template are labels.

Errors are `{"code": <status>, "message": …}`. Clients retry 429, 502, 503 and 504, so these are given where trying again may help.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from fastapi import Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from app.gateway.context import CallerOf, GatewayOf
from app.gateway.e2b import ENVD_VERSION, Sandbox, control_errors, data_errors, sandbox_id_of, sandbox_of
from app.gateway.e2b_templates import Templates
from app.gateway.errors import BadRequest, GatewayError
from app.gateway.records import Record
from app.gateway.shape import shape_router
from tangram.action import LONGEST_S

DEFAULT_TIMEOUT_S = 300
"""Lease of a sandbox whose client names none, seconds."""

IMAGE_KEY = "tangram-image"
"""Key of metadata under which an image can be named."""

QUEUE_S = 50.0
"""Longest wait of a create in the queue, seconds: clients wait 60 for an answer."""

_log = logging.getLogger(__name__)


router = shape_router("e2b", control_errors, tags=["e2b"])
health_router = shape_router("e2b", data_errors, tags=["e2b"])


class NotServed(GatewayError):
    """Raised for what E2B has and this system does not."""

    status, kind = 501, "not_served"


class CreateBody(BaseModel):
    """What a sandbox is to be; fields that are not listed here are ignored."""

    templateID: str = Field(min_length=1, max_length=512)
    timeout: int = Field(DEFAULT_TIMEOUT_S, gt=0, le=int(LONGEST_S))
    metadata: dict[str, str] = {}
    envVars: dict[str, str] = {}
    autoPause: bool = False
    allow_internet_access: bool | None = None
    network: dict[str, Any] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volumeMounts: list[Any] = []


class TimeoutBody(BaseModel):
    """A new lease, seconds from now; 0 ends the sandbox."""

    timeout: int = Field(ge=0, le=int(LONGEST_S))


class ConnectBody(BaseModel):
    """The lease that a sandbox must have at least, seconds from now."""

    timeout: int | None = Field(None, ge=0, le=int(LONGEST_S))


@router.post("/v2/sandboxes", status_code=201)
@router.post("/sandboxes", status_code=201, include_in_schema=False)
async def create(
    body: CreateBody,
    caller: CallerOf,
    gateway: GatewayOf,
    request: Request,
    key: Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)] = None,
) -> dict[str, Any]:
    """Open a sandbox; the same key gives the same one."""
    if body.autoPause:
        raise BadRequest("autoPause: not served here: have `on_timeout` be `kill`, after which a sandbox ends with its timeout")
    for field in ("mcp", "iam", "volumeMounts"):
        if getattr(body, field):
            raise BadRequest(f"{field}: not served here")
    if body.network or body.allow_internet_access is False:
        _log.warning("job %s names a network for a sandbox: that is for the operator of the nodes to say", caller.job)
    template = await Templates(gateway.store, caller.job).resolve(body.templateID, gateway.journal)
    record = await gateway.environments.open(
        caller,
        image=body.metadata.get(IMAGE_KEY, template.image),
        template=body.templateID,
        memory_mb=template.memory_mb,
        cpus=template.cpus,
        metadata=body.metadata,
        variables=body.envVars,
        owner="e2b",
        key=f"e2b-{key}" if key is not None else None,
        lease_s=body.timeout,
        deadline_s=QUEUE_S,
        request=request,
    )
    return _access(record)


@router.get("/v2/sandboxes")
@router.get("/sandboxes", include_in_schema=False)
async def list_sandboxes(
    caller: CallerOf,
    gateway: GatewayOf,
    response: Response,
    metadata: str = "",
    state: str = "running,paused",
    template: str | None = None,
    order: str = "asc",
    started_after: Annotated[datetime | None, Query(alias="startedAfter")] = None,
    next_token: Annotated[str, Query(alias="nextToken")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[dict[str, Any]]:
    """Return a page of the job's sandboxes, the oldest first by default."""
    after = _seconds(started_after) if started_after is not None else None
    wanted = {unquote(name): unquote(value) for name, value in parse_qsl(metadata, keep_blank_values=True)}
    found = [
        record
        for record in await gateway.environments.list(caller)
        if record.state == "open"
        and "running" in state.split(",")
        and wanted.items() <= record.metadata.items()
        and (template is None or template == record.template)
        and (after is None or record.created_at >= after)
    ]
    found.sort(key=lambda record: (record.created_at, record.id), reverse=order == "desc")
    # A page begins behind the last sandbox of the one before, also where that is gone meanwhile.
    if next_token:
        seen, _, last = next_token.partition(" ")
        mark = (_number(seen), last)
        found = [one for one in found if (((one.created_at, one.id) < mark) if order == "desc" else ((one.created_at, one.id) > mark))]
    if len(found) > limit:
        found = found[:limit]
        response.headers["x-next-token"] = f"{found[-1].created_at!r} {found[-1].id}"
    return [_shown(record) for record in found]


@router.get("/sandboxes/{sandbox}")
async def get_sandbox(sandbox: str, caller: CallerOf, gateway: GatewayOf) -> dict[str, Any]:
    """Return one sandbox."""
    record = await gateway.environments.look(caller, sandbox)
    return {**_shown(record), "envdAccessToken": record.access_token}


@router.delete("/sandboxes/{sandbox}", status_code=204)
async def kill(sandbox: str, caller: CallerOf, gateway: GatewayOf) -> None:
    """Close a sandbox: its processes end, its files are gone."""
    await gateway.environments.close(caller, sandbox)


@router.post("/v2/sandboxes/{sandbox}/connect")
@router.post("/sandboxes/{sandbox}/connect", include_in_schema=False)
@router.post("/sandboxes/{sandbox}/resume", include_in_schema=False)
async def connect(sandbox: str, body: ConnectBody, caller: CallerOf, gateway: GatewayOf) -> dict[str, Any]:
    """Return what a client needs to use a sandbox, and make its lease longer where it is shorter than asked for."""
    record = await gateway.environments.look(caller, sandbox)
    if body.timeout:
        record = await gateway.environments.extend(caller, sandbox, body.timeout)
    return _access(record)


@router.post("/sandboxes/{sandbox}/timeout", status_code=204)
async def set_timeout(sandbox: str, body: TimeoutBody, caller: CallerOf, gateway: GatewayOf) -> None:
    """Have the lease end so many seconds from now."""
    if body.timeout:
        await gateway.environments.renew(caller, sandbox, body.timeout)
    else:
        await gateway.environments.close(caller, sandbox)


@router.put("/sandboxes/{sandbox}/network", status_code=204)
async def set_network(sandbox: str, caller: CallerOf, gateway: GatewayOf) -> None:
    """Take note: the network of a sandbox is for the operator of the nodes to say."""
    record = await gateway.environments.get(caller, sandbox)
    _log.warning("job %s names a network for sandbox %s: that is for the operator of the nodes to say", caller.job, record.id)


@router.get("/sandboxes/{sandbox}/metrics")
async def get_metrics(sandbox: str, caller: CallerOf, gateway: GatewayOf) -> list[dict[str, Any]]:
    """Return no samples: what sandboxes use is in the journal, by action."""
    await gateway.environments.get(caller, sandbox)
    return []


@router.post("/sandboxes/{sandbox}/{verb}", include_in_schema=False)
async def not_served(sandbox: str, verb: str, caller: CallerOf, gateway: GatewayOf) -> None:
    """Refuse pause, fork and snapshots."""
    await gateway.environments.get(caller, sandbox)
    raise NotServed(f"{verb} is not served here")


@health_router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(request: Request) -> Response:
    """Say that the process answers, or, where the request names a sandbox, whether that stands."""
    if not sandbox_id_of(request):
        return JSONResponse({"status": "ok"})
    sandbox: Sandbox = await sandbox_of(request)
    await sandbox.gateway.environments.look(sandbox.caller, sandbox.record.id)
    return Response(status_code=204)


def _access(record: Record) -> dict[str, Any]:
    """Return what a client needs to use a sandbox."""
    return {**_identity(record), "envdAccessToken": record.access_token, "trafficAccessToken": record.access_token, "domain": None}


def _identity(record: Record) -> dict[str, Any]:
    return {
        "templateID": record.template or record.image or "base",
        "sandboxID": record.id,
        "clientID": record.job,
        "envdVersion": ENVD_VERSION,
    }


def _shown(record: Record) -> dict[str, Any]:
    """Return what is told of a sandbox. It has no cores of its own: each of its commands has up to `cpuCount`, as many as are free."""
    ends_at = record.ends_at if record.ends_at is not None else time.time() + DEFAULT_TIMEOUT_S
    return {
        **_identity(record),
        "startedAt": _time(record.created_at).isoformat(),
        "endAt": _time(ends_at).isoformat(),
        "cpuCount": record.cpus,
        "memoryMB": record.memory_mb or 0,
        "diskSizeMB": 0,
        "state": "running",
        "metadata": record.metadata,
    }


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _seconds(time: datetime) -> float:
    try:
        return time.timestamp()
    except (ValueError, OverflowError):
        raise BadRequest("startedAfter: beyond the years that clocks know") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadRequest("nextToken: not one that was given out") from None
