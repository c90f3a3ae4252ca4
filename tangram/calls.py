"""From a trainer's words to actions: one function for each thing a trainer can ask for, used by both clients.

Every function returns a checked `Action` and sends nothing. The options are typed once here; the clients pass them
through. Names and shapes of the arguments are those in `tangram.wire`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Required, TypedDict, Unpack

from tangram import arguments, input_messages
from tangram.action import CORES, MEMORY_MB, QUOTA_PREFIX, TOKENS_PREFIX, Action, Cost, check_name, command_class
from tangram.arguments import (
    AnyPath,
    folder_path,
    iterable,
    listed,
    path_text,
    present,
    process_variables,
    program_words,
    request_body,
    takes,
    truth,
    whole_number,
)
from tangram.arrays import ArrayError, pack_ints
from tangram.elasticity import LARGEST_AMOUNT, make_curve
from tangram.errors import InvalidAction
from tangram.requests import Headers, request_arguments
from tangram.results import Snapshot
from tangram.wire import MOST_TOP_K, node_label

Conversation = Sequence[Mapping[str, str]]
"""Messages, each with `role` and `content`, for the model's chat template."""

_NUL = re.compile("\0")
"""What no path has. Halves of surrogate pairs stand for bytes of names that are no UTF-8."""

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
HOPED_PARALLEL_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Place:
    """Where the actions of an environment belong."""

    job: str
    trajectory: str
    environment: str


class Limits(TypedDict, total=False):
    """Options of every action.

    `timeout_s` counts from the start of execution, `queue_timeout_s` from submission; `priority` is 0 to 9, higher goes first, 5 by
    default.
    """

    timeout_s: float | None
    queue_timeout_s: float | None
    priority: int | None


class OpenOptions(Limits, total=False):
    """Options of an environment that is opened.

    Without a `trajectory` it is one of its own, whose name is the environment's id. `memory_mb` is the most memory that it may use. This is
    granted as it is used where the node can do that, and from the beginning if `memory` is `fixed` instead of `elastic`. `requires` are
    labels that its node must have. From a `snapshot` it has the files of that, and is opened on the same node. One that is
    `detached` is not closed when this process dies: it stands until its lease is over, for another client to use. It is closed `lease_s`
    seconds after it stands, in use or not; without a lease, once it was unused for `TANGRAM_LEASE_S`. `owner` tells operators whose it is:
    host and process by default. It must stand within `timeout_s` seconds of its start on the node, which include fetching its image.
    """

    trajectory: str
    image: str | None
    snapshot: Snapshot | None
    memory_mb: int | None
    requires: Iterable[str]
    detached: bool
    lease_s: float | None
    owner: str
    memory: str


class ExecOptions(Limits, total=False):
    """Options of a command.

    `units` are the acceptable numbers of cores, `[1]` by default. `parallel_fraction` (Amdahl) or `efficiency` (E(m) by m) says what units
    do to its duration, `work_s` its seconds on one core. Where several amounts are given and neither is said, nine tenths are hoped to be
    parallel, until core-seconds show what is. `action_class` says which commands are alike, those with the same first word by default. It
    is killed when it prints nothing for `output_timeout_s`. `session` names the shell session it runs in, `variables`, also called `env`,
    are added to its process environment. It begins in the folder `cwd`, else where the session is; where it cannot, the call fails by the
    caller's fault (`bad_input`). An `interpreter` is a program and arguments such as `["bash", "-c"]`. `command` is its last argument
    then. It runs as a program of its own, so nothing of it, such as a changed folder, stays in the session. With `merged`, its standard
    error goes where its standard output goes. A `fence`, as before a scoring run, first ends what earlier commands left running in the
    environment. The command then starts from a clean shell: without the variables and functions that they left, in the folder where they
    were. A command whose node is lost never runs again, `idempotent` or not: its environment is lost, too. One that is not `preemptible`
    keeps its cores once it has them: for timing runs, and for programs with clocks of their own. With `stream`, what it prints can be
    read while it runs, by `Handle.output`. With `stdin`, it reads what `Handle.send_input` brings, else nothing. `pty` gives the rows
    and columns of a terminal, which is its input and output. All that it prints is `stdout` then, and what it has started ends with it.
    """

    units: Sequence[int]
    output_timeout_s: float | None
    session: str
    cwd: AnyPath | None
    interpreter: Sequence[AnyPath] | None
    merged: bool
    fence: bool
    parallel_fraction: float | None
    efficiency: Mapping[int | str, float] | None
    work_s: float | None
    idempotent: bool
    preemptible: bool
    action_class: str | None
    variables: Mapping[str, str] | None
    env: Mapping[str, str] | None
    stream: bool
    stdin: bool
    pty: tuple[int, int] | None


class ServiceOptions(Limits, total=False):
    """Options of an invocation of a GPU service.

    `units` are the acceptable numbers of GPU cells, by default the service's own size. The rest as in `ExecOptions`; these actions are
    idempotent unless said otherwise. `trajectory` tells whose action this is, for cancelling.
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

    `tokens` says how many tokens it is expected to cost, 0 by default; what the answer says corrects it. An idempotent request that the API
    refuses (429, or 503 with `Retry-After`) waits again in the queue, a few times; of any other the refusal is the answer.
    """

    url: Required[str]
    method: str
    headers: Mapping[str, str] | None
    body: bytes | str | None
    json: Any
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


def make_up_environment(name: str = "env") -> str:
    """Return a fresh id of an environment that begins with `name`."""
    return f"{name}-{secrets.token_hex(8)}"


@takes(OpenOptions)
def open_environment(job: str, environment: str = "", **options: Unpack[OpenOptions]) -> Action:
    """Open a fresh environment, by default under an id made up here, which is its trajectory's where none is named."""
    image, snapshot, memory_mb = options.get("image"), options.get("snapshot"), options.get("memory_mb")
    requires = listed("requires", options.get("requires", ()))
    if image is not None and not isinstance(image, str):
        raise InvalidAction("image", f"must be the name of an image, not {image!r:.200}")
    if snapshot is not None:
        if not isinstance(snapshot, Snapshot):
            raise InvalidAction("snapshot", f"must be one that an environment has made, not {snapshot!r:.200}")
        if image is not None:
            raise InvalidAction("image", "give either an image or a snapshot, not both")
        image, requires = snapshot.image, [*requires, node_label(snapshot.node)]
    environment = environment or make_up_environment()
    return Action(
        kind="cpu.open",
        arguments=present(environment=environment, image=image, memory_mb=memory_mb),
        cost=Cost({MEMORY_MB: (memory_mb,)} if memory_mb is not None else {}),
        job=job,
        trajectory=options.get("trajectory") or environment,
        environment=environment,
        requires=tuple(requires),
        **_given(options, "detached", "lease_s", "owner", "memory"),
    )


def snapshot(place: Place) -> Action:
    """Keep the files of an environment as they are now, for environments to be opened from."""
    return _of_environment("cpu.snapshot", place)


@takes(ExecOptions)
def execute(place: Place, command: str, **options: Unpack[ExecOptions]) -> Action:
    """Run a shell command in an environment."""
    words = program_words(options.get("interpreter"), command)
    session, action_class = options.get("session", "main"), options.get("action_class")
    cost = Cost.of(cores=options.get("units", (1,)))
    parallel_fraction, efficiency = options.get("parallel_fraction"), options.get("efficiency")
    if parallel_fraction is None and efficiency is None and len(cost.amounts[CORES]) > 1:
        parallel_fraction = HOPED_PARALLEL_FRACTION
    return Action(
        kind="cpu.exec",
        arguments=present(
            environment=place.environment,
            session=session,
            command=command,
            variables=process_variables(options.get("variables"), options.get("env")),
            cwd=folder_path("cwd", options.get("cwd")),
            interpreter=None if words is None else words[:-1],
            **{name: truth(name, options.get(name, False)) or None for name in ("merged", "fence", "stream", "stdin")},
            terminal=input_messages.terminal(options.get("pty")),
        ),
        cost=cost,
        curve=make_curve(parallel_fraction, efficiency),
        job=place.job,
        trajectory=place.trajectory,
        environment=place.environment,
        session=session,
        action_class=action_class if action_class is not None else command_class(command),
        **_given(options, "work_s", "output_timeout_s", "idempotent", "preemptible"),
    )


def read_file(place: Place, path: AnyPath, *, offset: int | None = None, length: int | None = None) -> Action:
    """Read a file of an environment, or `length` bytes of it from `offset` on; relative paths start at its working folder."""
    return _file(place, "cpu.read_file", path, present(offset=offset, length=length))


def write_file(place: Place, path: AnyPath, data: bytes | str, mode: int | None = None, *, offset: int | None = None) -> Action:
    """Write a file of an environment; text as UTF-8, `mode` are its permission bits.

    With an `offset` the file keeps as many bytes, which it must have, and ends with `data`: so a large file is written in parts.
    """
    whole = arguments.content("data", data)
    if mode is not None and (isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o777):
        raise InvalidAction("mode", f"must be permission bits from 0 to 0o777, not {mode!r}")
    return _file(place, "cpu.write_file", path, present(data=whole, mode=mode, offset=offset))


@takes(Limits)
def request(
    place: Place,
    port: int,
    path: str = "/",
    *,
    method: str = "GET",
    headers: Headers | None = None,
    body: bytes | str | None = None,
    **limits: Unpack[Limits],
) -> Action:
    """Have a server that runs in an environment answer an HTTP request, on one core."""
    action = _of_environment("cpu.request", place, **request_arguments(port, path, method, headers, body))
    return replace(action, cost=Cost.of(cores=1), action_class=f"{method} :{port}", **_given(limits))


def close_environment(place: Place) -> Action:
    """Close an environment: its processes end, its files are gone."""
    return _of_environment("cpu.close", place, idempotent=True)


def close_session(place: Place, session: str, *, idle_only: bool = False) -> Action:
    """Close a shell session once what was submitted to it has ended; with `idle_only` one stays in which a program runs on."""
    check_name("session", session)
    return _of_environment("cpu.close_session", place, session=session, idle_only=idle_only or None, idempotent=True)


def _of_environment(kind: str, place: Place, *, idempotent: bool = False, session: str | None = None, **more: Any) -> Action:
    return Action(
        kind=kind,
        arguments=present(environment=place.environment, session=session, **more),
        job=place.job,
        trajectory=place.trajectory,
        environment=place.environment,
        session=session,
        idempotent=idempotent,
    )


def score(job: str, service: str, items: Sequence[Any], options: ServiceOptions) -> Action:
    """Have a reward model score `items`, one score each."""
    return _invoke(job, "gpu.score", service, {"items": listed("items", items)}, **options)


def logprobs(job: str, service: str, token_ids: Iterable[Iterable[int]], options: ServiceOptions, *, top_k: int | None = None) -> Action:
    """Have a teacher give the log-probabilities of sequences of token ids: lists, arrays, or rows of one array.

    With `top_k` it gives the ranks of the ids, too, and the `top_k` most likely ids of each position.
    """
    if top_k is not None:
        whole_number("top_k", top_k, MOST_TOP_K)
    sequences = [iterable(f"token_ids[{index}]", ids) for index, ids in enumerate(iterable("token_ids", token_ids))]
    try:
        packed = pack_ints(sequences)
    except ArrayError as error:
        raise InvalidAction(f"token_ids[{error.index}]", error.problem) from None
    return _invoke(job, "gpu.logprobs", service, present(token_ids=packed, top_k=top_k), **options)


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
    arguments = present(prompts=listed("prompts", prompts), max_tokens=max_tokens, temperature=temperature, seed=seed)
    return _invoke(job, "gpu.generate", service, arguments, **options)


@takes(Limits)
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
    **limits: Unpack[Limits],
) -> Action:
    """Send one request to an outside API, against its quota; GET, HEAD and OPTIONS count as idempotent."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InvalidAction("url", f"must begin with http:// or https://, not {str(url)[:40]!r}")
    if not isinstance(method, str) or not (method.isascii() and method.isalpha()):
        raise InvalidAction("method", f"must be an HTTP method, not {str(method)[:40]!r}")
    if not isinstance(quota, str) or not quota:
        raise InvalidAction("quota", f"must be the name of a quota, not {quota!r}")
    whole_number("tokens", tokens, LARGEST_AMOUNT)
    if not isinstance(headers or {}, Mapping) or not all(isinstance(word, str) for pair in (headers or {}).items() for word in pair):
        raise InvalidAction("headers", f"must be texts by name, not {headers!r:.200}")
    method, given = method.upper(), dict(headers or {})
    return Action(
        kind="api.call",
        arguments=present(quota=quota, method=method, url=url, body=request_body(body, json, given), headers=given or None),
        cost=Cost({QUOTA_PREFIX + quota: (1,)} | ({TOKENS_PREFIX + quota: (tokens,)} if tokens else {})),
        job=job,
        trajectory=trajectory,
        work_s=work_s,
        idempotent=method in _SAFE_METHODS if idempotent is None else idempotent,
        action_class=action_class,
        **_given(limits),
    )


def _file(place: Place, kind: str, path: AnyPath, more: Mapping[str, Any]) -> Action:
    for name in ("offset", "length"):
        whole_number(name, more.get(name, 0), 1 << 62)
    return _of_environment(kind, place, idempotent=kind == "cpu.read_file", path=path_text("path", path, _NUL), **more)


@takes(ServiceOptions)
def _invoke(job: str, kind: str, service: str, arguments: Mapping[str, Any], **options: Unpack[ServiceOptions]) -> Action:
    units = options.get("units")
    return Action(
        kind=kind,
        arguments={"service": service, **arguments},
        cost=Cost() if units is None else Cost.of(cells=units),
        curve=make_curve(options.get("parallel_fraction"), options.get("efficiency")),
        job=job,
        service=service,
        **{"idempotent": True, **_given(options, "work_s", "idempotent", "action_class", "trajectory")},
    )


def _given(options: Mapping[str, object], *names: str) -> dict[str, Any]:
    """Return the limits among some options, and those of these names, as fields of an action; what is not given keeps its default."""
    fields = {name: options[name] for name in (*names, *Limits.__annotations__) if name in options}
    if fields.get("priority") is None:
        fields.pop("priority", None)
    return fields
