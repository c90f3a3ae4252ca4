"""From a trainer's words to actions: one function for each thing a trainer can ask for, used by both clients.

Every function returns a checked `Action` and sends nothing. The options are typed once here; the clients pass them
through. Names and shapes of the arguments are those in `tangram.wire`.
"""

from __future__ import annotations

import json as json_module
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from tangram import giving
from tangram.action import CELLS, CORES, DEFAULT_PRIORITY, MEMORY_MB, QUOTA_PREFIX, TOKENS_PREFIX, Action, Cost, command_class
from tangram.arrays import ArrayError, pack_ints
from tangram.elasticity import make_curve
from tangram.errors import InvalidAction
from tangram.results import Snapshot
from tangram.wire import node_label

Conversation = Sequence[Mapping[str, str]]
"""Messages, each with `role` and `content`, for the model's chat template."""

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""What no shell can be given: NUL, and halves of surrogate pairs, which have no UTF-8 form. Models write both."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the actions of an environment belong."""

    job: str
    trajectory: str
    environment: str


class Limits(TypedDict, total=False):
    """Options of every action.

    `timeout_s` counts from the start of execution, `queue_timeout_s` from submission; `priority` is 0 to 9,
    higher goes first, 5 by default.
    """

    timeout_s: float | None
    queue_timeout_s: float | None
    priority: int | None


HOPED_PARALLEL_FRACTION = 0.9


class ExecOptions(Limits, total=False):
    """Options of a command.

    `units` are the acceptable numbers of cores, `[1]` by default. `parallel_fraction` (Amdahl) or `efficiency`
    (E(m) by m) says what units do to its duration, `work_s` its seconds on one core. Where several amounts are given and
    neither is said, nine tenths are hoped to be parallel, until core-seconds show what is. `action_class` says which
    commands are alike, those with the same first word by default. It is killed when it prints nothing for
    `output_timeout_s`. `session` names the shell session it runs in, `variables` are added to its process environment. With
    `fence`, as before a scoring run, whatever earlier commands left running in the environment is ended first, and the command
    starts from a clean shell: without the variables and functions that they left, in the folder where they were.
    A command whose node is lost never runs again, `idempotent` or not: its environment is lost, too. One that is not `preemptible`
    keeps its cores once it has them: for timing runs, and for programs with clocks of their own.
    With `stream`, what it prints can be read while it runs, by `Handle.output`. With `stdin`, it reads what `Handle.send_input`
    brings, else nothing. With `pty`, rows and columns, its input and output are a terminal of that size: all that it prints is
    `stdout`, and what it has started ends with it.
    """

    units: Sequence[int]
    output_timeout_s: float | None
    session: str
    fence: bool
    parallel_fraction: float | None
    efficiency: Mapping[int | str, float] | None
    work_s: float | None
    idempotent: bool
    preemptible: bool
    action_class: str | None
    variables: Mapping[str, str] | None
    stream: bool
    stdin: bool
    pty: tuple[int, int] | None


class ServiceOptions(Limits, total=False):
    """Options of an invocation of a GPU service.

    `units` are the acceptable numbers of GPU cells, by default the service's own size. The rest as in `ExecOptions`;
    these actions are idempotent unless said otherwise. `trajectory` tells whose action this is, for cancelling.
    """

    units: Sequence[int] | None
    parallel_fraction: float | None
    efficiency: Mapping[int | str, float] | None
    work_s: float | None
    idempotent: bool
    action_class: str | None
    trajectory: str


class CallOptions(Limits, total=False):
    """Options of a request to an outside API; GET, HEAD and OPTIONS are idempotent unless said otherwise.

    `tokens` says how many tokens it is expected to cost, 0 by default; what the answer says corrects it. An idempotent
    request that the API refuses (429, or 503 with `Retry-After`) waits again in the queue, a few times; of any other the
    refusal is the answer.
    """

    tokens: int
    idempotent: bool | None
    trajectory: str
    work_s: float | None
    action_class: str | None


def place_of(action: Action) -> Place:
    """Return where an action on an environment belongs. Raises `InvalidAction` where it names none."""
    if not action.environment:
        raise InvalidAction("environment", f"{action.kind} needs an environment")
    return Place(action.job, action.trajectory, action.environment)


def open_environment(
    job: str,
    *,
    trajectory: str,
    image: str | None = None,
    snapshot: Snapshot | None = None,
    memory_mb: int | None = None,
    requires: Iterable[str] = (),
    detached: bool = False,
    timeout_s: float | None = None,
    queue_timeout_s: float | None = None,
    priority: int | None = None,
) -> Action:
    """Open a fresh environment, under an id made up here; from a `snapshot` it has the files of that, on the same node."""
    if snapshot is not None:
        if image is not None:
            raise InvalidAction("image", "give either an image or a snapshot, not both")
        image, requires = snapshot.image, (*requires, node_label(snapshot.node))
    environment = f"env-{secrets.token_hex(8)}"
    return Action(
        kind="cpu.open",
        arguments=_given(environment=environment, image=image, memory_mb=memory_mb),
        cost=Cost({MEMORY_MB: (memory_mb,)} if memory_mb is not None else {}),
        job=job,
        trajectory=trajectory,
        environment=environment,
        requires=requires if isinstance(requires, str) else tuple(requires),  # type: ignore[arg-type]  # refused by Action
        detached=detached,
        timeout_s=timeout_s,
        queue_timeout_s=queue_timeout_s,
        priority=_priority(priority),
    )


def snapshot(place: Place) -> Action:
    """Keep the files of an environment as they are now, for environments to be opened from."""
    return Action(
        kind="cpu.snapshot",
        arguments={"environment": place.environment},
        job=place.job,
        trajectory=place.trajectory,
        environment=place.environment,
    )


def execute(
    place: Place,
    command: str,
    *,
    units: Sequence[int] = (1,),
    timeout_s: float | None = None,
    queue_timeout_s: float | None = None,
    output_timeout_s: float | None = None,
    session: str = "main",
    fence: bool = False,
    parallel_fraction: float | None = None,
    efficiency: Mapping[int | str, float] | None = None,
    work_s: float | None = None,
    priority: int | None = None,
    idempotent: bool = False,
    preemptible: bool = True,
    action_class: str | None = None,
    variables: Mapping[str, str] | None = None,
    stream: bool = False,
    stdin: bool = False,
    pty: tuple[int, int] | None = None,
) -> Action:
    """Run a shell command in an environment; options as in `ExecOptions`."""
    if not isinstance(command, str) or not command.strip() or _UNWRITABLE.search(command):
        raise InvalidAction("command", "must be a command line")
    cost = Cost.of(cores=units)
    if parallel_fraction is None and efficiency is None and len(cost.amounts[CORES]) > 1:
        parallel_fraction = HOPED_PARALLEL_FRACTION
    return Action(
        kind="cpu.exec",
        arguments=_given(
            environment=place.environment,
            session=session,
            command=command,
            variables=_variables(variables),
            fence=fence or None,
            stream=stream or None,
            stdin=stdin or None,
            terminal=giving.terminal(pty),
        ),
        cost=cost,
        curve=make_curve(parallel_fraction, efficiency),
        job=place.job,
        trajectory=place.trajectory,
        environment=place.environment,
        session=session,
        work_s=work_s,
        timeout_s=timeout_s,
        queue_timeout_s=queue_timeout_s,
        output_timeout_s=output_timeout_s,
        priority=_priority(priority),
        idempotent=idempotent,
        preemptible=preemptible,
        action_class=action_class if action_class is not None else command_class(command),
    )


def read_file(place: Place, path: str, *, offset: int | None = None, length: int | None = None) -> Action:
    """Read a file of an environment, or `length` bytes of it from `offset` on; relative paths start at its working folder."""
    return _file(place, "cpu.read_file", path, _given(offset=offset, length=length))


def write_file(place: Place, path: str, data: bytes | str, mode: int | None = None, *, offset: int | None = None) -> Action:
    """Write a file of an environment; text as UTF-8, `mode` are its permission bits.

    With an `offset` the file keeps as many bytes, which it must have, and ends with `data`: so a large file is written in parts.
    """
    if isinstance(data, str):
        data = data.encode()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidAction("data", f"must be bytes or text, not {type(data).__name__}")
    if mode is not None and (isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o777):
        raise InvalidAction("mode", f"must be permission bits from 0 to 0o777, not {mode!r}")
    return _file(place, "cpu.write_file", path, _given(data=bytes(data), mode=mode, offset=offset))


def close_environment(place: Place) -> Action:
    """Close an environment: its processes end, its files are gone."""
    return Action(
        kind="cpu.close",
        arguments={"environment": place.environment},
        job=place.job,
        trajectory=place.trajectory,
        environment=place.environment,
        idempotent=True,
    )


def score(job: str, service: str, items: Sequence[Any], options: ServiceOptions) -> Action:
    """Have a reward model score `items`, one score each."""
    return _invoke(job, "gpu.score", service, {"items": _listed("items", items)}, **options)


def logprobs(job: str, service: str, token_ids: Iterable[Iterable[int]], options: ServiceOptions) -> Action:
    """Have a teacher give the log-probabilities of sequences of token ids: lists, arrays, or rows of one array."""
    sequences = [_iterable(f"token_ids[{index}]", ids) for index, ids in enumerate(_iterable("token_ids", token_ids))]
    try:
        packed = pack_ints(sequences)
    except ArrayError as error:
        raise InvalidAction(f"token_ids[{error.index}]", error.problem) from None
    return _invoke(job, "gpu.logprobs", service, {"token_ids": packed}, **options)


def generate(
    job: str,
    service: str,
    prompts: Sequence[str | Conversation],
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    options: ServiceOptions,
) -> Action:
    """Have a model, e.g. a judge, continue `prompts`."""
    arguments = _given(prompts=_listed("prompts", prompts), max_tokens=max_tokens, temperature=temperature, seed=seed)
    return _invoke(job, "gpu.generate", service, arguments, **options)


def call(
    job: str,
    quota: str,
    *,
    url: str,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | str | None = None,
    json: Any = None,
    tokens: int = 0,
    idempotent: bool | None = None,
    trajectory: str = "",
    work_s: float | None = None,
    action_class: str | None = None,
    timeout_s: float | None = None,
    queue_timeout_s: float | None = None,
    priority: int | None = None,
) -> Action:
    """Send one request to an outside API, against its quota; GET, HEAD and OPTIONS count as idempotent."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InvalidAction("url", f"must begin with http:// or https://, not {str(url)[:40]!r}")
    if not isinstance(method, str) or not method.isalpha():
        raise InvalidAction("method", f"must be an HTTP method, not {str(method)[:40]!r}")
    if not isinstance(quota, str) or not quota:
        raise InvalidAction("quota", f"must be the name of a quota, not {quota!r}")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise InvalidAction("tokens", f"must be a whole number, 0 or more, not {tokens!r}")
    method = method.upper()
    given = dict(headers or {})
    return Action(
        kind="api.call",
        arguments=_given(quota=quota, method=method, url=url, body=_body(body, json, given), headers=given or None),
        cost=Cost({QUOTA_PREFIX + quota: (1,)} | ({TOKENS_PREFIX + quota: (tokens,)} if tokens else {})),
        job=job,
        trajectory=trajectory,
        work_s=work_s,
        timeout_s=timeout_s,
        queue_timeout_s=queue_timeout_s,
        priority=_priority(priority),
        idempotent=method in _SAFE_METHODS if idempotent is None else idempotent,
        action_class=action_class,
    )


def _file(place: Place, kind: str, path: str, more: Mapping[str, Any]) -> Action:
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidAction("path", f"must be a path, not {path!r}")
    for name in ("offset", "length"):
        if isinstance(value := more.get(name, 0), bool) or not isinstance(value, int) or value < 0:
            raise InvalidAction(name, f"must be a number of bytes, not {value!r}")
    return Action(
        kind=kind,
        arguments={"environment": place.environment, "path": path, **more},
        job=place.job,
        trajectory=place.trajectory,
        environment=place.environment,
        idempotent=kind == "cpu.read_file",
    )


def _invoke(
    job: str,
    kind: str,
    service: str,
    arguments: Mapping[str, Any],
    *,
    units: Sequence[int] | None = None,
    parallel_fraction: float | None = None,
    efficiency: Mapping[int | str, float] | None = None,
    work_s: float | None = None,
    timeout_s: float | None = None,
    queue_timeout_s: float | None = None,
    priority: int | None = None,
    idempotent: bool = True,
    action_class: str | None = None,
    trajectory: str = "",
) -> Action:
    return Action(
        kind=kind,
        arguments={"service": service, **arguments},
        cost=Cost({CELLS: tuple(units)} if units is not None else {}),
        curve=make_curve(parallel_fraction, efficiency),
        job=job,
        trajectory=trajectory,
        service=service,
        work_s=work_s,
        timeout_s=timeout_s,
        queue_timeout_s=queue_timeout_s,
        priority=_priority(priority),
        idempotent=idempotent,
        action_class=action_class,
    )


def _body(body: bytes | str | None, json_body: Any, headers: dict[str, str]) -> bytes | None:
    """Return the bytes of a request; a JSON body also sets the content type."""
    if json_body is None:
        return body.encode() if isinstance(body, str) else body
    if body is not None:
        raise InvalidAction("body", "give either body or json, not both")
    if not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "application/json"
    try:
        return json_module.dumps(json_body).encode()
    except (TypeError, ValueError) as error:
        raise InvalidAction("json", str(error)) from None


def _variables(variables: Mapping[str, str] | None) -> dict[str, str] | None:
    for name, value in (variables or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name or _UNWRITABLE.search(name + value):
            raise InvalidAction("variables", f"must be names and texts, not {name!r}: {value!r}")
    return dict(variables) if variables else None


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    return list(_iterable(name, values))


def _iterable(name: str, values: Iterable[Any]) -> Iterable[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidAction(name, f"must be a list, not {type(values).__name__}")
    return values


def _given(**arguments: Any) -> dict[str, Any]:
    """Leave out what was not given."""
    return {name: value for name, value in arguments.items() if value is not None}


def _priority(priority: int | None) -> int:
    return DEFAULT_PRIORITY if priority is None else priority
