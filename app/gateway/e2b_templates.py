"""E2B's templates: names of images, kept per job.

A template that names an image, without build steps, is ready at once. Images are built where images are built: steps are refused, with
the way out in the message.

| key | holds |
|---|---|
| `tangram-gw-e2b-templates-<digest of the job>` | hash: a template by its id; lives for `KEPT_S` beyond its last use |
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any, cast

from pydantic import BaseModel, Field
from redis.asyncio import Redis

from app.gateway.context import CallerOf, GatewayOf
from app.gateway.e2b import control_errors
from app.gateway.errors import BadRequest, NotFound
from app.gateway.journal import Journal
from app.gateway.records import MOST_CPUS
from app.gateway.sessions import digest
from app.gateway.shape import shape_router
from tangram.wire import CONTAINERS

KEPT_S = 90 * 24 * 3600
"""Seconds for which the templates of a job are kept after their last use."""

BASE = "base"
"""The template of clients that name none: no image."""

_IMAGE = re.compile(r"[/:]")
_TAG = re.compile(r":[^/:]*$")
_NO_TAGS = "tags of templates are not served here"
_NO_STEPS = "steps and start commands are not served here: build an image that has them, and name that"


class Template(BaseModel):
    """A template; `image` is absent until its build has named one."""

    id: str
    name: str
    image: str | None = None
    memory_mb: int | None = None
    cpus: int = 1
    problem: str = ""


class NewTemplate(BaseModel):
    """A template as a client asks for it; without a memory limit its sandboxes have that of the nodes."""

    name: str = Field("", max_length=512)
    alias: str = Field("", max_length=512)
    tags: list[str] = []
    memoryMB: int | None = Field(None, ge=1)
    cpuCount: int = Field(1, ge=1, le=MOST_CPUS)


class Build(BaseModel):
    """What a template is made from."""

    fromImage: str | None = Field(None, max_length=512)
    fromTemplate: str | None = Field(None, max_length=512)
    fromImageRegistry: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    startCmd: str | None = None


class Templates:
    """The templates of one job. Every method raises what redis-py raises."""

    def __init__(self, store: Redis, job: str) -> None:
        self._store = store
        self._job = job
        self._key = f"tangram-gw-e2b-templates-{digest(job)}"

    def id_of(self, name: str) -> str:
        """Return the id of the template that has, or would have, a name."""
        return f"tpl-{digest(self._job, name)[:20]}"

    async def put(self, template: Template) -> None:
        """Write a template."""
        await self._store.hset(self._key, template.id, template.model_dump_json(exclude_defaults=True))
        await self._store.expire(self._key, KEPT_S)

    async def find(self, name_or_id: str) -> Template | None:
        """Return a template by its name or its id; None where there is none."""
        for known in (name_or_id, self.id_of(name_or_id)):
            raw = await cast(Awaitable[bytes | None], self._store.hget(self._key, known))
            if raw is not None:
                await self._store.expire(self._key, KEPT_S)
                return Template.model_validate_json(raw)
        return None

    async def get(self, name_or_id: str) -> Template:
        """Return a template by its name or its id. Raises `NotFound`."""
        template = await self.find(name_or_id)
        if template is None:
            raise NotFound(f"template {name_or_id!r} was not found")
        return template

    async def all(self) -> list[Template]:
        """Return all templates, by name."""
        raws = await cast(Awaitable[dict[bytes, bytes]], self._store.hgetall(self._key))
        return sorted((Template.model_validate_json(raw) for raw in raws.values()), key=lambda template: template.name)

    async def remove(self, template: Template) -> None:
        """Remove a template."""
        await self._store.hdel(self._key, template.id)

    async def resolve(self, name: str, journal: Journal) -> Template:
        """Return what a sandbox with `templateID` `name` is made from. Raises `NotFound` and `BadRequest`.

        A name that no template has is an image where it looks like one. Else it is a label, but where nodes have containers.
        """
        template = await self.find(name)
        if template is not None:
            if template.problem:
                raise BadRequest(template.problem)
            return template
        if name == BASE:
            return Template(id=BASE, name=BASE)
        if _IMAGE.search(name) or CONTAINERS not in await journal.labels():
            return Template(id=name, name=name, image=name)
        raise NotFound(f"template {name!r} was not found: build one of that name, or name an image")


router = shape_router("e2b", control_errors, tags=["e2b"])


@router.post("/v3/templates", status_code=202)
async def new_template(body: NewTemplate, caller: CallerOf, gateway: GatewayOf) -> dict[str, Any]:
    """Take a name for a template, whose build is to follow."""
    name = body.name or body.alias
    if not name:
        raise BadRequest("name: a template must have one")
    if body.tags:  # which would make NAME:TAG an image
        raise BadRequest(f"tags: {_NO_TAGS}: name the template {_TAG.sub('', name)}:{body.tags[0]}")
    templates = Templates(gateway.store, caller.job)
    # A template that stands stays usable while it is built anew.
    template = await templates.find(name) or Template(id=templates.id_of(name), name=name, problem="the template has not been built")
    await templates.put(template.model_copy(update={"memory_mb": body.memoryMB, "cpus": body.cpuCount}))
    return {"templateID": template.id, "buildID": template.id, "public": False, "names": [name], "aliases": [name], "tags": body.tags}


@router.post("/v2/templates/{template}/builds/{build}", status_code=202)
async def start_build(template: str, build: str, body: Build, caller: CallerOf, gateway: GatewayOf) -> None:
    """Take an image for a template."""
    templates = Templates(gateway.store, caller.job)
    known = await templates.get(template)
    if body.steps or body.startCmd:
        raise BadRequest(_NO_STEPS)
    if body.fromImageRegistry:
        raise BadRequest("credentials of registries are not served here: the engines of the nodes have theirs")
    image = (await templates.get(body.fromTemplate)).image if body.fromTemplate else body.fromImage
    await templates.put(known.model_copy(update={"image": image, "problem": ""}))


@router.get("/templates/{template}/files/{digest}", include_in_schema=False)
async def files_of_step(template: str, digest: str) -> None:
    """Refuse the step that copies files: clients ask where they go before they name steps."""
    raise BadRequest(_NO_STEPS)


@router.get("/templates/{template}/builds/{build}/status")
async def build_status(template: str, build: str, caller: CallerOf, gateway: GatewayOf) -> dict[str, Any]:
    """Say whether a template can be used."""
    known = await Templates(gateway.store, caller.job).get(template)
    answer = {"logs": [], "logEntries": [], "templateID": known.id, "buildID": build, "status": "ready"}
    return answer | ({"status": "error", "reason": {"message": known.problem}} if known.problem else {})


@router.get("/templates/aliases/{alias:path}")
async def alias(alias: str, caller: CallerOf, gateway: GatewayOf) -> dict[str, Any]:
    """Say which template has a name."""
    return {"templateID": (await Templates(gateway.store, caller.job).get(alias)).id, "public": False}


@router.get("/templates")
@router.get("/v2/templates", include_in_schema=False)
async def list_templates(caller: CallerOf, gateway: GatewayOf) -> list[dict[str, Any]]:
    """Return the job's templates."""
    return [
        {
            "templateID": one.id,
            "buildID": one.id,
            "names": [one.name],
            "aliases": [one.name],
            "public": False,
            "memoryMB": one.memory_mb or 0,
            "cpuCount": one.cpus,
        }
        for one in await Templates(gateway.store, caller.job).all()
    ]


@router.get("/templates/{template:path}/tags", include_in_schema=False)
@router.delete("/templates/tags", include_in_schema=False)
async def no_tags() -> None:
    """Refuse both. A removal would look like that of a template called `tags`. A client that finds no tags learns why at its build."""
    raise NotFound(_NO_TAGS)


@router.delete("/templates/{template:path}", status_code=204)
async def delete_template(template: str, caller: CallerOf, gateway: GatewayOf) -> None:
    """Remove a template; sandboxes that were made from it stay."""
    templates = Templates(gateway.store, caller.job)
    await templates.remove(await templates.get(template))
