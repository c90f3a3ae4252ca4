"""From what Celery stores about a task to what a trainer gets: a value, or the error that says how the action ended.

| status in the store | becomes |
|---|---|
| `SUCCESS`, built-in kind | the payload's value: `ExecResult`, `bytes`, `HttpAnswer`, `None`, `Scores`, `Logprobs`, `Texts` or `Response` |
| `SUCCESS`, any other task | the task's plain value |
| `FAILURE` of a class in `tangram.errors` | that error |
| `FAILURE` of any other class | `ActionFailed("Class: message")`: a worker's fault for a built-in kind, else the program's |
| `REVOKED` | `ActionCancelled` |
| anything else | nothing yet: the action goes on |

Nothing read here is trusted: what does not have the shape of `tangram.wire` ends as `ActionFailed`, never as another error; its cause is
`result_lost`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from kombu.utils.json import loads
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tangram import clock
from tangram.action import KINDS
from tangram.arrays import ArrayError, by_position, unpack_floats, unpack_ints
from tangram.blobs import Blobs
from tangram.ends import CAUSES, USUAL
from tangram.errors import BY_STATUS, ActionCancelled, ActionError, ActionFailed, ActionRefused, EnvironmentLost
from tangram.results import Act, ExecResult, HttpAnswer, Logprobs, Response, Scores, Snapshot, Texts

_OF_MORE_PARTS: dict[str, type[EnvironmentLost] | type[ActionRefused]] = {
    "EnvironmentLost": EnvironmentLost,
    "ActionRefused": ActionRefused,
}
_ERRORS: dict[str, type[ActionError]] = {error.__name__: error for error in (*BY_STATUS.values(), EnvironmentLost, ActionRefused)}
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_MaybeBlob = str | dict[str, Any]


class _Times(BaseModel):
    """The parts of the ACT that the stack measured, seconds."""

    queue_s: _Seconds
    background_s: _Seconds = 0.0
    execution_s: _Seconds


class _Payload(BaseModel):
    """What the tasks of this system return (`tangram.wire.Payload`)."""

    status: Literal["succeeded", "timed_out"]
    value: Any = None
    reason: str = ""
    cause: str = ""
    dop: int
    act: _Times


class _Exec(BaseModel):
    """The value of `cpu.exec`."""

    exit_code: int | None
    stdout: _MaybeBlob
    stderr: _MaybeBlob
    truncated: bool = False
    cpu_s: float = 0.0
    max_rss_mb: float = 0.0


class _File(BaseModel):
    """The value of `cpu.read_file`."""

    data: _MaybeBlob


class _HttpAnswer(BaseModel):
    """The value of `cpu.request`."""

    status: int
    headers: Any
    body: _MaybeBlob


class _Answer(BaseModel):
    """The value of `api.call`."""

    model_config = ConfigDict(strict=True)

    status_code: int
    headers: dict[str, str] = {}
    body: _MaybeBlob = ""
    truncated: bool = False


_FLOATS = TypeAdapter(list[float])
_STRINGS = TypeAdapter(list[str])
_PAIRS = TypeAdapter(tuple[tuple[str, str], ...])
_SNAPSHOT = TypeAdapter(Snapshot)


class Meta(BaseModel):
    """What Celery stores about a task, as far as it matters here."""

    status: str
    result: Any = None

    @property
    def final(self) -> bool:
        """Whether the task has ended."""
        return self.status in ("SUCCESS", "FAILURE", "REVOKED")


def read_meta(raw: bytes) -> Meta:
    """Parse what the result store holds under a task's key. Raises `ActionFailed` where that is no result."""
    try:
        return Meta.model_validate(loads(raw))
    except Exception as error:
        # kombu's JSON runs decoders by type name, each of which raises as it likes.
        raise ActionFailed(f"its result is unreadable: {_first_line(error)}", "result_lost") from None


def decode(kind: str, meta: Meta, submitted: float, blobs: Blobs) -> Any:
    """Return the value of an action of `kind` that was submitted at `submitted` on the monotonic clock.

    Raises the `ActionError` that says how the action ended, if not with a value.
    """
    stored = stored_value(kind, meta)
    if kind not in KINDS:
        return stored
    try:
        payload = _Payload.model_validate(stored)
        return _DECODERS[kind](payload, lambda: _act(payload, submitted), blobs)
    except (ValidationError, ArrayError) as error:
        raise ActionFailed(f"the result of {kind} is unreadable: {_first_line(error)}", "result_lost") from None


def drop_parts(meta: Meta, blobs: Blobs) -> None:
    """Forget the large parts of a result, which nobody asks for again."""
    value = meta.result.get("value") if isinstance(meta.result, Mapping) else None
    if isinstance(value, Mapping):
        blobs.drop(value, *value.values())


def stored_value(kind: str, meta: Meta) -> Any:
    """Return what a task of `kind` that has ended returned, as stored. Raises the `ActionError` that says how it ended otherwise."""
    if meta.status == "REVOKED":
        raise ActionCancelled(", ".join(_failure_parts(meta.result)) or "revoked")
    if meta.status == "FAILURE":
        raise _failure(kind, meta.result)
    return meta.result


def _act(payload: _Payload, submitted: float) -> Act:
    """Account for the whole wait of the trainer: what the stack has not measured was overhead."""
    parts = payload.act
    overhead_s = max(0.0, clock.monotonic() - submitted - parts.queue_s - parts.background_s - parts.execution_s)
    return Act(queue_s=parts.queue_s, background_s=parts.background_s, overhead_s=overhead_s, execution_s=parts.execution_s)


_Timer = Callable[[], Act]
"""Closes the account; called once the value is here, so that fetching blobs counts."""


def _exec(payload: _Payload, act: _Timer, blobs: Blobs) -> ExecResult:
    value = _Exec.model_validate(payload.value)
    texts = {"stdout": blobs.get_text(value.stdout), "stderr": blobs.get_text(value.stderr)}
    cause = payload.cause if payload.cause in CAUSES else USUAL[payload.status]
    told = {**dict(value), **texts}
    return ExecResult(status=payload.status, dop=payload.dop, act=act(), reason=payload.reason, cause=cause, **told)


def _read_file(payload: _Payload, act: _Timer, blobs: Blobs) -> bytes:
    return blobs.get(_File.model_validate(payload.value).data)


def _http_answer(payload: _Payload, act: _Timer, blobs: Blobs) -> HttpAnswer:
    value = _HttpAnswer.model_validate(payload.value)
    headers, body = _PAIRS.validate_python(blobs.get_json(value.headers)), blobs.get(value.body)
    return HttpAnswer(status=value.status, headers=headers, body=body, dop=payload.dop, act=act())


def _snapshot(payload: _Payload, act: _Timer, blobs: Blobs) -> Snapshot:
    return _SNAPSHOT.validate_python(payload.value)


def _nothing(payload: _Payload, act: _Timer, blobs: Blobs) -> None:
    return None


def _scores(payload: _Payload, act: _Timer, blobs: Blobs) -> Scores:
    value = blobs.get_json(payload.value)
    scores = Scores(_one_list(value) if isinstance(value, Mapping) else _FLOATS.validate_python(value))
    scores.act, scores.dop = act(), payload.dop
    return scores


def _one_list(packed: Mapping[str, object]) -> list[float]:
    lists = unpack_floats(packed)
    if len(lists) != 1:
        raise ArrayError(f"offsets: one list was expected, not {len(lists)}")
    return lists[0]


def _logprobs(payload: _Payload, act: _Timer, blobs: Blobs) -> Logprobs:
    value = blobs.get_json(payload.value)
    logprobs = _ranked(value) if isinstance(value, Mapping) and "ranks" in value else Logprobs(unpack_floats(value))
    logprobs.act, logprobs.dop = act(), payload.dop
    return logprobs


def _ranked(value: Mapping[str, Any]) -> Logprobs:
    """Read log-probs that come with ranks and the most likely ids."""
    logprobs = Logprobs(unpack_floats(value.get("logprobs", {})))
    ranks, top_ids = unpack_ints(value["ranks"]), unpack_ints(value.get("top_ids", {}))
    top_logprobs, lengths = unpack_floats(value.get("top_logprobs", {})), [len(one) for one in logprobs]
    if not [len(one) for one in ranks] == lengths or not len(top_ids) == len(top_logprobs) == len(lengths):
        raise ArrayError("offsets: ranks and most likely ids are not those of the log-probs")
    logprobs.ranks = ranks
    logprobs.top_ids = [by_position(ids, length) for ids, length in zip(top_ids, lengths, strict=True)]
    logprobs.top_logprobs = [by_position(values, length) for values, length in zip(top_logprobs, lengths, strict=True)]
    return logprobs


def _texts(payload: _Payload, act: _Timer, blobs: Blobs) -> Texts:
    texts = Texts(_STRINGS.validate_python(blobs.get_json(payload.value)))
    texts.act, texts.dop = act(), payload.dop
    return texts


def _response(payload: _Payload, act: _Timer, blobs: Blobs) -> Response:
    value = _Answer.model_validate(payload.value)
    told = {**dict(value), "body": blobs.get(value.body)}
    return Response(act=act(), **told)


_DECODERS: dict[str, Callable[[_Payload, _Timer, Blobs], Any]] = {
    "cpu.open": _nothing,
    "cpu.exec": _exec,
    "cpu.read_file": _read_file,
    "cpu.write_file": _nothing,
    "cpu.request": _http_answer,
    "cpu.snapshot": _snapshot,
    "cpu.close_session": _nothing,
    "cpu.close": _nothing,
    "gpu.score": _scores,
    "gpu.logprobs": _logprobs,
    "gpu.generate": _texts,
    "api.call": _response,
}


def _failure(kind: str, result: object) -> ActionError:
    """Rebuild the error that a failed task stored: by class name, from its arguments."""
    name = result.get("exc_type") if isinstance(result, Mapping) else None
    if not isinstance(name, str):
        return ActionFailed(f"failed without a readable error: {str(result)[:200]}", "result_lost")
    parts = _failure_parts(result)
    known, of_more = _ERRORS.get(name), _OF_MORE_PARTS.get(name)
    if of_more is not None and len(parts) in (2, 3):
        return of_more(*(parts if parts[-1] in CAUSES else parts[:2]))
    if known is not None and len(parts) == 2 and parts[1] in CAUSES:
        return known(parts[0], parts[1])
    text = ", ".join(parts)
    if name == "NotRegistered" and kind not in KINDS:  # Celery's word, which comes before the node's
        return ActionFailed(f"no task {text} is known there: name its module with `tangram worker --include`", "impossible")
    return known(text) if known else ActionFailed(f"{name}: {text}" if text else name, "worker_failed" if kind in KINDS else "error")


def _failure_parts(result: object) -> list[str]:
    """Return an exception's arguments; Celery stores them as a list, some writers one string."""
    message = result.get("exc_message") if isinstance(result, Mapping) else None
    if isinstance(message, (list, tuple)):
        return [str(part) for part in message]
    return [] if message is None else [str(message)]


def _first_line(error: Exception) -> str:
    """Say in one line where a value is wrong."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(step) for step in first['loc']) or 'value'}: {first['msg']}"
    return str(error).partition("\n")[0][:200] or type(error).__name__
