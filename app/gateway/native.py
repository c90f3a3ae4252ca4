"""The gateway's own shape, `/api/v1`, for languages that have no client of ours.

Requests that are sent again with the same header `Idempotency-Key` run once; all get the result of the first. A call whose connection
breaks is cancelled unless it has a key. Errors are `{"error": {"kind", "message"}}` (`app/gateway/errors.py`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_jsonable_python

from app.gateway import calls
from app.gateway.context import CallerOf, Gateway, GatewayOf
from app.gateway.errors import NotFound
from app.gateway.records import Record, name_key
from app.gateway.services import as_many
from app.gateway.shape import plain_answer, shape_router
from app.gateway.stored_results import stored_result
from tangram import calls as words
from tangram.ends import fault_of
from tangram.errors import ActionError
from tangram.results import Act, ExecResult, Logprobs, Scores, Texts
from tangram.wire import RESULT_KEY_PREFIX

router = shape_router("native", plain_answer, prefix="/api/v1", tags=["native"])

Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=256)]
Path = Annotated[str, Query(min_length=1, description="Path of the file; relative to the work folder.")]

_POLL_S, _STORE_LOOKS = 0.1, 10


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenBody(_Body):
    """What an environment is to be; `lease_s` is when it closes, in use or not. A `name` is unique within the job."""

    image: str | None = None
    memory_mb: int | None = Field(None, ge=1)
    requires: list[str] = []
    trajectory: str = ""
    name: str = Field("", max_length=256)
    metadata: dict[str, str] = {}
    lease_s: float | None = Field(None, gt=0)
    queue_timeout_s: float | None = Field(None, gt=0)


class LeaseBody(_Body):
    """A new lease, seconds from now."""

    lease_s: float = Field(gt=0)


class ExecBody(_Body):
    """A command and its limits; meanings as in `tangram.calls.ExecOptions`."""

    command: str
    session: str = "main"
    units: list[int] = [1]
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    output_timeout_s: float | None = None
    variables: dict[str, str] = {}
    cwd: str | None = None
    interpreter: list[str] | None = None
    merged: bool = False
    fence: bool = False
    preemptible: bool = True
    work_s: float | None = None
    parallel_fraction: float | None = None
    action_class: str | None = None


class ServiceBody(_Body):
    """Which service is asked, and the limits; meanings as in `tangram.calls.ServiceOptions`."""

    service: str
    units: list[int] | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    trajectory: str = ""
    action_class: str | None = None

    def options(self) -> words.ServiceOptions:
        """Return the options of the action."""
        return {name: getattr(self, name) for name in ServiceBody.model_fields if name != "service"}  # type: ignore[return-value]


class ScoreBody(ServiceBody):
    """What a reward model is to score."""

    items: list[Any]


class LogprobsBody(ServiceBody):
    """Sequences of token ids for a teacher."""

    token_ids: list[list[int]]
    top_k: int | None = None


class GenerateBody(ServiceBody):
    """Prompts for a model; what is absent is the service's own default."""

    prompts: list[str]
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


class EnvironmentAnswer(BaseModel):
    """An environment; times are seconds since the epoch."""

    id: str
    state: str
    trajectory: str
    image: str | None
    name: str
    metadata: dict[str, str]
    created_at: float
    ends_at: float | None

    @classmethod
    def of(cls, record: Record) -> EnvironmentAnswer:
        """Return what callers see of a record."""
        return cls.model_validate(record.model_dump(include=set(cls.model_fields)))


class ActAnswer(BaseModel):
    """Where the time of an action went, seconds."""

    queue_s: float
    background_s: float
    overhead_s: float
    execution_s: float


class ExecAnswer(BaseModel):
    """How a command ended: `succeeded` with an exit code, or `timed_out` without; `cause` and `fault` are words of docs/ends.md."""

    status: str
    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool
    reason: str
    cause: str
    fault: str
    dop: int
    cpu_s: float
    max_rss_mb: float
    act: ActAnswer


class ScoresAnswer(BaseModel):
    """One score per item."""

    scores: list[float]
    dop: int
    act: ActAnswer


class LogprobsAnswer(BaseModel):
    """For n token ids n-1 log-probabilities, a list per sequence; what is known with `top_k` only is null without it."""

    logprobs: list[list[float]]
    ranks: list[list[int]] | None = None
    top_ids: list[list[list[int]]] | None = None
    top_logprobs: list[list[list[float]]] | None = None
    dop: int
    act: ActAnswer


class TextsAnswer(BaseModel):
    """One text per prompt."""

    texts: list[str]
    dop: int
    act: ActAnswer


class ActionAnswer(BaseModel):
    """How an action is; `result` is there once it has succeeded, or its command timed out. Bytes are base64 text.

    `cause` and `fault` say why it has ended so (docs/ends.md).
    """

    id: str
    kind: str
    status: str
    reason: str = ""
    cause: str = ""
    fault: str = ""
    result: Any = None


@router.post("/environments", status_code=201)
async def open_environment(body: OpenBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> EnvironmentAnswer:
    """Open an environment; the same name or key gives the same one."""
    if key is not None:
        await calls.check_key(request, name_key(caller.job, "key", key))
    asked = body.model_dump(exclude={"requires", "queue_timeout_s"})
    record = await gateway.environments.open(
        caller, **asked, requires=tuple(body.requires), key=key, deadline_s=body.queue_timeout_s, request=request
    )
    return EnvironmentAnswer.of(record)


@router.get("/environments")
async def list_environments(caller: CallerOf, gateway: GatewayOf) -> list[EnvironmentAnswer]:
    """Return the job's environments that stand."""
    return [EnvironmentAnswer.of(record) for record in await gateway.environments.list(caller)]


@router.get("/environments/{environment}")
async def get_environment(environment: str, caller: CallerOf, gateway: GatewayOf) -> EnvironmentAnswer:
    """Return one environment."""
    return EnvironmentAnswer.of(await gateway.environments.look(caller, environment))


@router.post("/environments/{environment}/lease")
async def renew(environment: str, body: LeaseBody, caller: CallerOf, gateway: GatewayOf) -> EnvironmentAnswer:
    """Have the lease end so many seconds from now."""
    return EnvironmentAnswer.of(await gateway.environments.renew(caller, environment, body.lease_s))


@router.delete("/environments/{environment}", status_code=204)
async def close_environment(environment: str, caller: CallerOf, gateway: GatewayOf) -> None:
    """Close an environment: its processes end, its files are gone."""
    await gateway.environments.close(caller, environment)


@router.post("/environments/{environment}/exec")
async def execute(environment: str, body: ExecBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> ExecAnswer:
    """Run a command and wait for it. One that fails, or is killed at its timeout, is a result."""
    record = await gateway.environments.get(caller, environment)
    options = body.model_dump(exclude={"command"})
    options["variables"] = {**record.variables, **body.variables}
    result: ExecResult = await calls.run(caller, words.execute(record.place, body.command, **options), key=key, request=request)
    return ExecAnswer.model_validate({**asdict(result), "fault": result.fault})


@router.get("/environments/{environment}/files", response_class=Response)
async def read_file(environment: str, path: Path, caller: CallerOf, gateway: GatewayOf, request: Request) -> Response:
    """Return the bytes of a file."""
    record = await gateway.environments.get(caller, environment)
    data: bytes = await calls.run(caller, words.read_file(record.place, path), request=request)
    return Response(data, media_type="application/octet-stream")


@router.put("/environments/{environment}/files", status_code=204)
async def write_file(
    environment: str,
    path: Path,
    caller: CallerOf,
    gateway: GatewayOf,
    request: Request,
    mode: Annotated[int | None, Query(ge=0, le=0o777, description="Permission bits, as a decimal number.")] = None,
    key: Key = None,
) -> None:
    """Write a file, with the folders above it; the body is its content."""
    record = await gateway.environments.get(caller, environment)
    data = await request.body()
    await calls.run(caller, words.write_file(record.place, path, data, mode), key=key, request=request)


@router.post("/score")
async def score(body: ScoreBody, caller: CallerOf, request: Request, key: Key = None) -> ScoresAnswer:
    """Have a reward model score items."""
    action = words.score(caller.job, body.service, body.items, body.options())
    scores: Scores = await calls.run(caller, action, key=key, request=request)
    return ScoresAnswer(scores=as_many(scores, body.items), dop=scores.dop, act=_act(scores.act))


@router.post("/logprobs")
async def logprobs(body: LogprobsBody, caller: CallerOf, request: Request, key: Key = None) -> LogprobsAnswer:
    """Have a teacher give the log-probabilities of token ids."""
    action = words.logprobs(caller.job, body.service, body.token_ids, body.options(), top_k=body.top_k)
    found: Logprobs = await calls.run(caller, action, key=key, request=request)
    known = {} if body.top_k is None else {"ranks": found.ranks, "top_ids": found.top_ids, "top_logprobs": found.top_logprobs}
    return LogprobsAnswer(logprobs=as_many(found, body.token_ids), dop=found.dop, act=_act(found.act), **known)


@router.post("/generate")
async def generate(body: GenerateBody, caller: CallerOf, request: Request, key: Key = None) -> TextsAnswer:
    """Have a model continue prompts."""
    action = words.generate(caller.job, body.service, body.prompts, body.max_tokens, body.temperature, body.seed, body.options())
    texts: Texts = await calls.run(caller, action, key=key, request=request)
    return TextsAnswer(texts=as_many(texts, body.prompts), dop=texts.dop, act=_act(texts.act))


@router.get("/actions/{action}")
async def get_action(
    action: str,
    caller: CallerOf,
    gateway: GatewayOf,
    wait_s: Annotated[float, Query(ge=0, le=3600, description="Longest wait for its end, seconds.")] = 0.0,
) -> ActionAnswer:
    """Return how an action is, and its result where that is still kept: an hour."""
    deadline = time.monotonic() + wait_s
    while True:
        answer = await _state_of(action, caller, gateway)
        if answer.status not in ("waiting", "running") or time.monotonic() >= deadline:
            return answer
        # The journal is asked once a second, the result store, to which that is less, more often.
        for _ in range(_STORE_LOOKS):
            await asyncio.sleep(_POLL_S)
            if time.monotonic() >= deadline or await gateway.store.exists(RESULT_KEY_PREFIX + action):
                break


@router.delete("/actions/{action}", status_code=202)
async def cancel_action(action: str, caller: CallerOf) -> None:
    """Ask for the end of an action; does not wait for that."""
    _check_own(action, caller)
    caller.session.cancel_task(action)


def _act(act: Act) -> ActAnswer:
    return ActAnswer.model_validate(asdict(act))


def _check_own(action: str, caller: CallerOf) -> None:
    if not action.startswith(f"{caller.session.client_id}-"):
        raise NotFound(f"action {action} is unknown")


async def _state_of(action: str, caller: CallerOf, gateway: Gateway) -> ActionAnswer:
    _check_own(action, caller)
    known = await gateway.journal.action(action)
    if known is None:
        raise NotFound(f"action {action} is unknown: it was never submitted, is not written down yet, or ended long ago")
    cause, fault = known.cause, fault_of(known.cause)
    answer = ActionAnswer(id=action, kind=known.kind, status=known.status, reason=known.reason, cause=cause, fault=fault)
    try:
        stored = await stored_result(gateway, known.kind, action)
    except ActionError as error:
        if error.cause == "result_lost" and known.status != "failed":
            return answer  # whoever ran it has its result, which was too large to be kept beside that
        return answer.model_copy(update={"status": error.status, "reason": str(error), "cause": error.cause, "fault": error.fault})
    if stored is None:
        return answer
    value = stored.value
    ended = {"status": "succeeded", "cause": "", "fault": ""}
    if isinstance(value, ExecResult):
        ended = {"status": value.status, "cause": value.cause, "fault": value.fault}
    return answer.model_copy(update={**ended, "result": to_jsonable_python(value, bytes_mode="base64")})
