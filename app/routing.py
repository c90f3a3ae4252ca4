"""The custom routing layer: any Celery task that declares its resources is an action and goes to the scheduler.

```python
@action(app, cores=[1, 2, 4], parallel_fraction=0.9, timeout_s=60)
def build(target: str) -> int: ...

build.delay("all")          # queued by the scheduler, granted 1, 2 or 4 cores, run by a worker
```

Two hooks of Celery do it. A *router* sends what is an action to the ingress queue. A `before_task_publish` handler
adds the header `tangram` where the sender gave none: the declared resources, and the time of submission. They work
for `delay`, `apply_async`, `send_task`, chains and groups alike, from trainers as from workers.

Where a deployment has several shards (`tangram/shards.py`), the router knows the environment of an action but not its id. So `Routed`, the
class of declared tasks, names the queue. What is sent by its name alone, and is for no environment, goes to the first shard.

Priority never reaches the broker: it lives in the scheduler's own queues, since on Redis a broker's priority is
approximate and reversed with respect to RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery, signals
from celery.utils import uuid

from app.action_task import ActionTask
from tangram import clock
from tangram.action import KINDS, Action, Amounts, Cost
from tangram.elasticity import make_curve
from tangram.settings import Settings
from tangram.shards import FIRST, are_of_first, shard_of, shard_of_action
from tangram.wire import ACTION_HEADER, GRANT_HEADER, INGRESS_QUEUE, direct_queue, of_shard

_SHARDS = "tangram_shards"
_declared: dict[str, Action] = {}


def declare(action: Action) -> None:
    """Make every message for the task `action.kind` an action with these resources."""
    _declared[action.kind] = action


def action(
    app: Celery,
    *,
    name: str | None = None,
    cores: Amounts | None = None,
    cells: Amounts | None = None,
    memory_mb: int | None = None,
    quotas: Mapping[str, int] | None = None,
    tokens: Mapping[str, int] | None = None,
    parallel_fraction: float | None = None,
    efficiency: Mapping[int | str, float] | None = None,
    **fields: Any,
) -> Callable[[Callable[..., Any]], ActionTask]:
    """Declare a function as a Celery task whose calls are actions.

    `quotas` are requests by quota, `tokens` what they are expected to cost there. Further `fields` are those of
    `tangram.Action`: `timeout_s`, `priority`, `idempotent`, `work_s` and so on. Raises `InvalidAction` when the resources are wrong, at
    import, with the name of the field.
    """
    amounts: dict[str, Amounts] = {f"quota:{quota}": count for quota, count in (quotas or {}).items()}
    amounts |= {f"tokens:{quota}": count for quota, count in (tokens or {}).items()}
    amounts |= {key: value for key, value in (("cores", cores), ("cells", cells), ("memory_mb", memory_mb)) if value is not None}

    def register(function: Callable[..., Any]) -> ActionTask:
        task: ActionTask = app.task(name=name, base=Routed)(function)
        declare(Action(kind=task.name, cost=Cost.of(**amounts), curve=make_curve(parallel_fraction, efficiency), **fields))
        return task

    return register


class Routed(ActionTask):
    """A declared task, whose calls go to the shard that they belong to."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: str | None = None, *rest: Any, **options: Any) -> Any:
        """Send the task; see Celery."""
        task_id, shards = task_id or uuid(), self.app.conf.get(_SHARDS, 1)
        headers = options.get("headers") or {}
        if shards > 1 and GRANT_HEADER not in headers and _environment_of(headers) is None:
            described = headers.get(ACTION_HEADER)
            cost = described.get("cost") if isinstance(described, Mapping) else None  # in place of the declared one
            needs_first = isinstance(cost, Mapping) and are_of_first(map(str, cost))
            shard = FIRST if needs_first else shard_of_action(task_id, _declared[self.name], shards)
            options = {"queue": direct_queue(of_shard(INGRESS_QUEUE, shard)), **options}
        return super().apply_async(args, kwargs, task_id, *rest, **options)


def install_routing(app: Celery, shards: int | None = None) -> None:
    """Put the routing layer into a Celery application, for as many shards as `TANGRAM_SHARDS` says."""
    shards = Settings().shards if shards is None else shards

    def route(name: str, args: Any, kwargs: Any, options: Mapping[str, Any], task: Any = None, **_: Any) -> dict[str, Any] | None:
        """Send actions to the ingress queue; leave all other tasks to Celery's usual routing."""
        headers = options.get("headers") or {}
        if GRANT_HEADER in headers or not (name in KINDS or name in _declared or ACTION_HEADER in headers):
            return None
        environment = _environment_of(headers)
        return {"queue": direct_queue(of_shard(INGRESS_QUEUE, FIRST if environment is None else shard_of(environment, shards)))}

    app.conf[_SHARDS] = shards
    app.conf.task_routes = (route,)
    signals.before_task_publish.connect(_add_header, weak=False, dispatch_uid="tangram-routing")


def _environment_of(headers: Mapping[str, Any]) -> str | None:
    """Return the id of the environment that an action is for, as far as its headers can be read: all else is the scheduler's to refuse."""
    described = headers.get(ACTION_HEADER)
    environment = described.get("environment") if isinstance(described, Mapping) else None
    return environment if isinstance(environment, str) else None


def _add_header(sender: str | None = None, headers: dict[str, Any] | None = None, **_: Any) -> None:
    """Describe the action in a message whose sender did not, or only in part.

    A description with a `kind` is whole; one without changes what was declared. What is no description at all is left
    to the scheduler, which refuses it: an error raised here would only be logged.
    """
    if headers is None or sender is None or GRANT_HEADER in headers:
        return
    given = headers.get(ACTION_HEADER)
    whole = given is not None and (not isinstance(given, Mapping) or "kind" in given)
    if whole or (given is None and sender not in _declared):
        return
    declared = _declared.get(sender)
    described = declared.to_header() if declared is not None else {"kind": sender}
    headers[ACTION_HEADER] = {"submitted_at": clock.time(), **described, **(given or {})}
