"""What the score and teacher shapes share: which service a call means, what is said of it, how its parameters and failures are treated.

Every path is there twice. `/services/NAME/v1/completions` asks the service NAME, whatever `model` says: for clients that name no service,
or name it otherwise. At the root, `model` names the service; a call that names none means the only one of the fitting task.

A parameter that the services do not know is accepted where it changes nothing, and refused otherwise. Where clients expect something
that is not known here (a rank, a number of tokens, why a text ended), the answer has null there, or lacks it.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import APIRouter, Header
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from app.gateway.calls import noted_actions
from app.gateway.context import CallerOf, Gateway, GatewayOf
from app.gateway.errors import BadRequest, GatewayError, InfraFailed, NotFound, Overloaded, StillRunning
from app.gateway.shape import shape_router

PREFIX = "/services/{service}"

Result = TypeVar("Result")
Task = Literal["score", "logprobs"]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=256)]

_WITHOUT_EFFECT = {
    *("cache_salt", "metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "request_id", "safety_identifier"),
    *("service_tier", "store", "stream_options", "tool_choice", "user"),
}
"""Parameters that do not change an answer, whatever their value."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "encoding_format": ("float",),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "stream": (False,),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "top_p": (1,),
    "use_beam_search": (False,),
}
"""Parameters that the services do not have, each with the values that say so."""


class Body(BaseModel):
    """A request; parameters beyond its fields are refused where they would change the answer."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_known_parameters(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _WITHOUT_EFFECT:
                continue
            # True is equal to 1, and means something else.
            if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL.get(name, ())):
                raise PydanticCustomError("not_served", "{name} is not served: leave it out", {"name": name})
        return self


class ModelBody(Body):
    """A request that may name its service."""

    model: str | None = None


class TextPart(BaseModel):
    """A part of a message; only texts are served."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Return it as services take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


def answer_error(_request: Request, error: GatewayError) -> Response:
    """Answer in OpenAI's form; what is to be sent again gets a 503, which all callers of these shapes try again."""
    again = isinstance(error, (Overloaded, StillRunning))
    status = 503 if again else error.status
    content = {"error": {"message": str(error), "type": error.kind, "param": None, "code": status}}
    return JSONResponse(content, status, dict(Overloaded.headers if again else error.headers))


router = shape_router("services", answer_error, tags=["services"])


def mounted(*routers: APIRouter) -> tuple[APIRouter, ...]:
    """Return routers for both places of each path."""
    named = APIRouter(prefix=PREFIX)
    for one in (router, *routers):
        named.include_router(one)
    named.add_api_route("/health", _health, tags=["services"])
    named.add_api_route("/health", _health, methods=["HEAD"], include_in_schema=False)
    return (router, *routers, named)


@router.get("/v1/models")
async def models(request: Request, _caller: CallerOf, gateway: GatewayOf) -> dict[str, Any]:
    """List the services that living nodes declare, those that give log-probs first: some clients take the first of all."""
    declared = await gateway.journal.services()
    wanted = request.path_params.get("service")
    if wanted is not None and wanted not in declared:
        raise NotFound(f"service {wanted} is declared by no node that is up")
    names = sorted(declared, key=lambda name: (declared[name] != "logprobs", name)) if wanted is None else [wanted]
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "tangram", "task": declared[name]} for name in names]
    return {"object": "list", "data": data}


async def _health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


async def service_of(request: Request, gateway: Gateway, model: str | None, task: Task) -> str:
    """Return the name of the service that a call means. Raises `BadRequest` where it names none and several would do, or none."""
    named = request.path_params.get("service") or model
    if named:
        return str(named)
    fitting = sorted(name for name, has in (await gateway.journal.services()).items() if has == task)
    if len(fitting) != 1:
        raise BadRequest(f"model: name a service of task {task!r}: {' or '.join(fitting) or 'there is none'}")
    return fitting[0]


def finite(scores: Iterable[float]) -> list[float]:
    """Return scores. Raises `InfraFailed` where one is no number, which says nothing about what was scored."""
    checked = list(scores)
    for index, score in enumerate(checked):
        if not math.isfinite(score):
            raise InfraFailed(f"score {index} is {score}", "engine_failed")
    return checked


def as_many(results: list[Result], asked: Sequence[object]) -> list[Result]:
    """Return results. Raises `InfraFailed` where there are not as many as were asked for: nobody can tell whose they are."""
    if len(results) != len(asked):
        raise InfraFailed(f"{len(asked)} items have {len(results)} results", "engine_failed")
    return results


def heading(kind: str, service: str, what: str = "list") -> dict[str, Any]:
    """Return what OpenAI's and vLLM's answers begin with; the id names the action, after `kind`."""
    return {"id": f"{kind}-{action_id()}", "object": what, "created": int(time.time()), "model": service}


def action_id() -> str:
    """Return the id of the last action of the call that is being served."""
    return (noted_actions.get() or [secrets.token_hex(8)])[-1]
