"""The words on the wire, shared by trainer, scheduler and workers.

| queue | from → to | holds |
|---|---|---|
| `actions` | trainer → scheduler | Celery task messages with header `tangram` (`Action.to_header`, `client`, `submitted_at`, `blobs`) |
| `node.<name>` | scheduler → worker | the same messages, same task id, with header `grant`; and control tasks, see below |
| `scheduler.events` | worker → scheduler | `{"events": [report, …]}`, see below |
| `scheduler.control` | trainer, CLI, live page → scheduler | `{"cancel": {...}}`, `{"renew": …}`, `{"give": …}`, `{"drain": …}` |

The first shard of a deployment has these names. Shard k has `actions.k`, `scheduler.events.k` and `scheduler.control.k` (`of_shard`), and
its own nodes (`tangram/shards.py`).

All four are plain durable queues on the default exchange (`direct_queue`), declared alike by everyone, so that Redis
and RabbitMQ route to them by name alone. A publisher whose connection broke sends what it had in hand once more:
a message may arrive twice, and its task id says so.

A report is one of joined, left, beat, started, sent, used, memory_wanted, finished, unknown and service.

A cancel names tasks, one trajectory of a job, or a whole job:
`{"cancel": {"ids": [id, ...]}}`, `{"cancel": {"trajectory": name, "job": name}}`, `{"cancel": {"job": name}}`. With one of the latter two a
client names the ids that it waits for, too: its cancel may be read before its submissions.

The lease of an environment is renewed, to end so many seconds from now, by `{"renew": {"environment": id, "job": name, "lease_s": 600}}`.

A node is drained, or put back into service, by `{"drain": {"node": name, "draining": true}}`.

What a command is given names its task, and client and job of the sender, one of which must be the command's own:
`{"give": {"id", "client", "job", "sender", "number", "what"}}`. `sender` is made up by whoever sends, for this command alone, and `number`
counts what it sends, from 1. The worker hands all of a sender on once and in this order. `what` is `["data", base64 of at most
GIVEN_BYTES]`, `["end"]`, `["signal", number]` or `["size", rows, columns]`.

A control task is a Celery task of the worker's own, whose result nobody reads:

| control task | arguments | meaning |
|---|---|---|
| `tangram.regrant` | epoch, serial, grants: list of `WireRegrant` | running commands have other cores, or go to the background |
| `tangram.allow` | epoch, allowances: list of `WireAllowance` | environments may use so much memory; paused programs go on |
| `tangram.stop` | id, attempt, reason, cause | a running action ends |
| `tangram.tell` | id, attempt | the worker reports the end of the action again, or that it never came |
| `tangram.let_go` | incarnation | the worker that hands over has been sent all that it gets |
| `tangram.give` | id, sender, number, what | a running command is given input, a signal, a size of its terminal |
| `tangram.restore` | service, cell_ids, evict | an instance of a service is restored |
| `tangram.close_environment` | id, attempt, reason | an environment closes |

A worker carries out several messages at once, so two of `tangram.regrant` can pass each other. `serial` counts these messages,
from 1 for each `epoch`. The worker drops a change that is older, by (`epoch`, `serial`), than the last one that it applied to the
same action, or than the grant itself; a grant is as old as the beginning of its epoch. The changes of one message are applied in
the order of the list. A change that comes before the message of its action is applied when that one comes.

Each allowance of an environment has a number, in `tangram.allow` and in a grant, which counts on for each `epoch`. The worker drops an
allowance that is older, by (`epoch`, number), than the last one that it has taken in of the same environment, whichever way that came.

The report `used` has `id`, `attempt` and `background_cpu_s`: the core-seconds that the command has got in the background so far.

The report `memory_wanted` has `environment`, `used_mb` and `allowance_mb`: the environment has used up its allowance of memory, and its
programs are paused. The worker sends it again with each beat until the allowance is larger. The report `finished` has `memory_mb`, the most
that the environment held while the action ran, and `resident_mb`, what it holds after its last running action. Both are whole MB, rounded
up, and absent where they were not measured. After that action, the worker lowers the allowance to `resident_mb` + `HEADROOM_MB`. `allowed`
is the (`epoch`, number) of the last allowance that the worker had taken in then: one that is newer may raise it again.

| kind | arguments | value of the payload |
|---|---|---|
| `cpu.open` | environment, image, memory_mb | null |
| `cpu.exec` | environment, session, command°, variables, more: see `tangram.calls.ExecOptions` | `{"exit_code", "stdout"°, "stderr"°, …}` |
| `cpu.read_file` | environment, path, offset, length | `{"data"°}` |
| `cpu.write_file` | environment, path, data°, mode, offset | null |
| `cpu.request` | environment, port, method, path, headers°: list of pairs, body° | `{"status", "headers"°, "body"°}` |
| `cpu.snapshot` | environment | `{"image", "node"}` |
| `cpu.close_session` | environment, session, idle_only | null |
| `cpu.close` | environment | null |
| `gpu.score` | service, items° | `tangram.arrays.PackedFloats`° of one list, or a list of floats°: one per item |
| `gpu.logprobs` | service, token_ids°: `tangram.arrays.PackedInts`, or lists; top_k | `PackedFloats`°; with top_k `PackedRanked`° |
| `gpu.generate` | service, prompts°, max_tokens, temperature, seed | list of strings° |
| `api.call` | quota, method, url, headers, body° | `{"status_code", "headers", "body"°, "truncated"}` |

An argument that was not given is absent. What is marked ° may be a *blob reference* `{"$blob": key, "bytes": n}` where
it is large (`tangram.blobs`). Bytes (`data`, `body`) are otherwise base64 text, all else is itself.

What a worker reports as `finished` has, of a request to an outside API, `answer`: `{"status", "retry_after_s", "tokens",
"requests"}`, the last three where there is something to say. The status is 0 where requests went out and no answer came. The report has
`waits_again`, true, where the API refused it and its grant said `may_wait_again`: then no result is stored, and the scheduler grants the
action once more. The same holds for a `cpu.open` that its node could not carry out: another node opens the environment.

A *payload* is the JSON result that the tasks of this system store in the Celery result backend:
`{"status", "value", "reason", "cause", "dop", "act": {"queue_s", "background_s", "overhead_s", "execution_s"}}`, with status
`succeeded` or, for commands only, `timed_out`. All other ends are Celery failures of the classes in `tangram.errors`.
A `cause` is a word of `tangram/ends.py`, or empty; the report `finished` has it, too, and so has `tangram.stop`.
Times on the wire are seconds since the epoch, durations seconds.

A command with `stream` has a Redis stream in the result store, under `OUTPUT_KEY_PREFIX` and its task id. Output is counted in bytes, both
streams together. An entry has the id `n-0`, where n counts all that was printed up to its end, so what is missing before it can be told:

| field | holds |
|---|---|
| `stdout`, `stderr` | bytes that the command printed |
| `end` | the last entry, `n-1`: how the action has ended, one of its six ends; `reason`, `cause`; `node` where its environment was lost |

Under `READ_KEY_PREFIX` and the task id, readers say up to which n they have read. A command whose output is not read waits for that.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from kombu import Exchange, Queue

INGRESS_QUEUE = "actions"
EVENTS_QUEUE = "scheduler.events"
CONTROL_QUEUE = "scheduler.control"
NODE_QUEUE_PREFIX = "node."

ACTION_HEADER = "tangram"
GRANT_HEADER = "grant"

RESULT_KEY_PREFIX = "celery-task-meta-"
"""Celery's Redis result backend stores and publishes the result of task t under this prefix + t."""

CLIENT_KEY_PREFIX = "tangram-client-"
NODE_KEY_PREFIX = "tangram-node-"
"""Under this and a node's name: the host and process of its worker, while that beats."""

CLAIM_KEY_PREFIX = "tangram-claim-"
DISOWNED = "disowned"
"""What the claim of a try says that the scheduler has given up. Otherwise it names the incarnation of the worker that runs the try."""
BLOB_KEY_PREFIX = "tangram-blob-"
SHARED_BLOB_KEY_PREFIX = BLOB_KEY_PREFIX + "shared-"
"""The prefix of blobs that several actions refer to. Others leave the store once their action has ended."""
OUTPUT_KEY_PREFIX = "tangram-output-"
READ_KEY_PREFIX = "tangram-read-"
SCHEDULER_KEY = "tangram-scheduler"
"""Where the active scheduler of the first shard shows its policy and figures, as JSON, in the result store."""
LOAD_KEY = "tangram-load"
"""Where the active scheduler of the first of several shards says what it carries (`WireLoad`), as JSON."""
SHARDS_KEY = "tangram-shards"
"""Where each active scheduler says how many shards there are."""
LOAD_TTL_S = 10
"""Seconds for which these two count."""

MEMORY_ENFORCED = "TANGRAM_MEMORY_ENFORCED"
"""A variable of commands: there where the kernel holds their environment to its memory."""

CUSHION_MB = 9
"""Memory, in MB, before the end of its allowance at which an environment is paused, unless the allowance is its limit."""

HEADROOM_MB = 20 + CUSHION_MB
"""The allowance of an idle environment, in MB, beyond what it holds. Scheduler and workers count with the same number."""

LONGEST_ID = 256
"""The most characters of an action's id, as of every name: a longer one may not fit into the journal's indexes."""

BLOB_THRESHOLD_BYTES = 32 * 1024
"""Payload parts larger than this travel beside the messages, as blobs in the result store."""

CLAIM_TTL_S = 24 * 3600
"""How much longer than its action may run a claim is kept: for the wait for a thread, for ends, and for messages that come late."""

ENDED_CLAIM_TTL_S = 2 * 3600
"""How long a claim is kept once its result is stored: twice as long as Celery waits until it hands out again what nobody acknowledged."""

BLOB_TTL_S = 3600
"""A blob is kept for so long after it was made, and those of an action's arguments for as long as the action has not ended: the scheduler
renews them, and removes them then."""

RESULT_TTL_S = 3600

MOST_TOP_K = 128
"""The most ids of a position that a teacher names: more would make the answer to a long sequence hundreds of megabytes."""

MOST_BODY_BYTES = 64 << 20
"""The most bytes of the body of a request to a port of an environment, and of its answer."""

GIVEN_BYTES = 64 * 1024
"""The most input for a command in one message."""

OUTPUT_TTL_S = 3600
"""The streamed output of a command is kept for so long after its last entry."""


class WireHoldings(TypedDict):
    """Amounts by resource: what is offered, and what each active job holds of it."""

    offered: dict[str, int]
    held: dict[str, dict[str, int]]


class WireKind(TypedDict):
    """Nodes with the same labels but for those of their names, and the memory of the largest."""

    labels: list[str]
    memory_mb: int


class WireLoad(TypedDict):
    """What a shard carries.

    `labels` are those of its CPU nodes, `kinds` these nodes by their labels. `cores` and `environments` are those of the nodes that take
    environments now. `opening` is how many opens wait. `units` are the cores, cells and requests that jobs hold, `memory` the memory and
    the start slots.
    """

    cores: int
    labels: list[str]
    kinds: list[WireKind]
    environments: int
    opening: int
    units: WireHoldings
    memory: WireHoldings


class WireAct(TypedDict):
    """Parts of an ACT, seconds."""

    queue_s: float
    background_s: float
    overhead_s: float
    execution_s: float


class Payload(TypedDict):
    """What the tasks of this system return."""

    status: str
    value: Any
    reason: str
    cause: str
    dop: int
    act: WireAct


WireRegrant = tuple[str, int, list[int], bool]
"""One change of `tangram.regrant`: an action's id, its attempt, the ids of its cores, and whether it is in the background.

In the background there are no cores. `units` of the grant becomes the number of cores; in the background it stays.
"""


WireAllowance = tuple[str, int, int]
"""One environment of `tangram.allow`, the memory in MB that it may use from now on, never above its limit, and the allowance's number."""


class WireEvicted(TypedDict):
    """An instance of a service that is to be thrown off its cells."""

    service: str
    cell_ids: list[int]


class WireGrant(TypedDict):
    """The header `grant`: what the scheduler gave, and its own times.

    `attempt` counts the tries of an action from 1. `epoch` is the fencing token of the scheduler that granted. `incarnation` names
    the worker process that it granted to: a restarted worker drops what was meant for the one before it.
    `units` is the DoP that the program is told, `most_units` what the grant may grow to while the action runs.
    `core_ids` or `cell_ids` are ids on the node, `evict` names the instances to be thrown off first, in order. In the
    `background` a command has no core of its own, so that `core_ids` is empty, and uses what other commands leave idle on the
    node. `may_wait_again` says whether an action goes back to the queue when the API refuses it, or its node cannot open it.
    Of an action that draws on quotas: `not_before`, when its request may go out; `usage_header`, the header of the answer
    that says how many tokens it cost; `hosts`, the hosts that its request may reach, without which it may reach public addresses.
    `allowance_mb` is the memory that the action's environment may use from the start of the action on, `allowance_serial` the number of
    this allowance. Both are absent where the allowance stays as it is.
    """

    node: str
    attempt: int
    epoch: int
    incarnation: NotRequired[str]
    units: int
    most_units: int
    core_ids: list[int]
    background: bool
    cell_ids: list[int]
    evict: list[WireEvicted]
    restore: bool
    submitted_at: float
    received_at: float
    granted_at: float
    may_wait_again: NotRequired[bool]
    not_before: NotRequired[float]
    usage_header: NotRequired[str]
    hosts: NotRequired[list[str]]
    allowance_mb: NotRequired[int]
    allowance_serial: NotRequired[int]


class WireInstance(TypedDict):
    """An instance of a service, named by its cells, as its worker last saw it.

    `state` is a word of the life cycle of services, `reason` says why where that needs a reason; `memory_mb` and `host_mb` are the
    measured MiB that it holds on its devices and in host memory, the rest counts since its worker began. Older workers count no
    wrong answers.
    """

    service: str
    cell_ids: list[int]
    state: str
    reason: str
    memory_mb: float
    host_mb: float
    starts: int
    restores: int
    evictions: int
    leaks: int
    wrong_answers: NotRequired[int]


class WireNode(TypedDict):
    """How a worker presents itself when it joins, and what a beat repeats so that a fresh scheduler learns it.

    | field | what it is |
    |---|---|
    | `running` | ids of the claimed actions that have not been reported finished |
    | `held_cores` | the cores that each claimed action holds |
    | `environments` | ids of the open environments |
    | `lost` | id, reason and cause of the environments that have ended by themselves of late, or that its worker could not adopt |
    | `instances` | instances of services that are not absent |
    | `domains` | ids of its cores, as grants name them, by what they share, neighbours side by side; without it 0 to `cores` - 1 |
    | `busy_cores` | how many cores were busy since the beat before, with whatever; absent where that is not measured |
    | `leaving` | whether its worker hands over to the next one (`workers/shutdown.py`); absent otherwise |
    | `takes_causes` | whether `tangram.stop` may name a cause; older workers take none |
    | `grants_memory` | whether each of its environments has an allowance of memory that can be changed, and pauses at it |
    | `environments_max` | the most environments that it takes at a time; absent or null for any number |
    | `allowed` | of environments that were granted memory: the MB that they may use now; epoch and number of their last allowance |
    """

    name: str
    kinds: list[str]
    labels: list[str]
    cores: int
    memory_mb: int
    cells: int
    cell_memory_mb: int
    services: dict[str, Any]
    running: list[str]
    environments: list[str]
    lost: NotRequired[list[tuple[str, str, str]]]
    incarnation: NotRequired[str]
    instances: NotRequired[list[WireInstance]]
    domains: NotRequired[list[list[int]]]
    busy_cores: NotRequired[float]
    held_cores: NotRequired[dict[str, list[int]]]
    leaving: NotRequired[bool]
    takes_causes: NotRequired[bool]
    grants_memory: NotRequired[bool]
    environments_max: NotRequired[int | None]
    allowed: NotRequired[dict[str, tuple[int, int, int]]]


def claim_key(action_id: str, attempt: int) -> str:
    """Return the key under which a try of an action is claimed."""
    return f"{CLAIM_KEY_PREFIX}{action_id}:{attempt}"


CONTAINERS = "isolation:container"
"""The label of nodes whose environments are containers."""


_NODE_LABEL = "node:"


def node_label(name: str) -> str:
    """Return the label that only the node `name` has."""
    return f"{_NODE_LABEL}{name}"


def is_node_label(label: str) -> bool:
    """Return whether only one node has a label: the one that it names."""
    return label.startswith(_NODE_LABEL)


def node_queue(name: str) -> str:
    """Return the queue of the node `name`."""
    return NODE_QUEUE_PREFIX + name


def of_shard(name: str, shard: int) -> str:
    """Return the name that the queue, key or lease `name` has in a shard."""
    return f"{name}.{shard}" if shard else name


def direct_queue(name: str) -> Queue:
    """Return the one declaration of the queue `name`: durable, on the default exchange, routed by its name."""
    return Queue(name, Exchange("", type="direct"), routing_key=name, durable=True)


INGRESS = direct_queue(INGRESS_QUEUE)
EVENTS = direct_queue(EVENTS_QUEUE)
CONTROL = direct_queue(CONTROL_QUEUE)
