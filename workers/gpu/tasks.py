"""The Celery tasks of a GPU node: `gpu.score gpu.logprobs gpu.generate`.

A call first carries out the scheduler's decision (evictions, a restore), which is overhead. Then it asks the engine, which is execution.
`tangram.restore` carries out a decision that no action waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from app.action_task import Call, PayloadTask
from app.celery import app
from tangram.action import Action
from tangram.arrays import PackedRanked, pack_floats, pack_ints
from tangram.wire import WireEvicted
from workers.context import GpuContext, context, refusals
from workers.control import this_node
from workers.gpu.call_control import CallControl
from workers.gpu.engines.abstract import Engine
from workers.gpu.execution import Execution
from workers.gpu.instances import InstanceName
from workers.gpu.items import TokenLogprobs

T = TypeVar("T")


@app.task(name="gpu.score", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def score(self: PayloadTask, service: str, items: Any, work_s: float = 0.0) -> Any:
    """Score prompt and response pairs with a reward model."""
    listed = gpu().blobs.get_json(items)
    scores = _ask(self, service, work_s, lambda engine, control: engine.score(listed, control))
    return gpu().blobs.put_json(pack_floats([scores], "float64"))


@app.task(name="gpu.logprobs", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def logprobs(self: PayloadTask, service: str, token_ids: Any, top_k: int | None = None, work_s: float = 0.0) -> Any:
    """Return a teacher's log-probabilities of given token ids; with `top_k` also ranks and the most likely ids."""
    sequences = gpu().blobs.get_json(token_ids)
    if top_k is not None:
        return gpu().blobs.put_json(
            packed_ranked(_ask(self, service, work_s, lambda engine, control: engine.ranked(sequences, top_k, control)))
        )
    lists = _ask(self, service, work_s, lambda engine, control: engine.logprobs(sequences, control))
    return gpu().blobs.put_json(pack_floats(lists))


@app.task(name="gpu.generate", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def generate(
    self: PayloadTask,
    service: str,
    prompts: Any,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    work_s: float = 0.0,
) -> Any:
    """Continue prompts."""
    listed = gpu().blobs.get_json(prompts)
    texts = _ask(self, service, work_s, lambda engine, control: engine.generate(listed, max_tokens, temperature, seed, control))
    return gpu().blobs.put_json(texts)


@app.task(name="tangram.restore", ignore_result=True)  # type: ignore[untyped-decorator]
def restore(service: str, cell_ids: list[int], evict: list[WireEvicted]) -> None:
    """Bring a service onto cells though no action waits for it; a report says how that ended."""
    gpu().prefetch.begin(InstanceName(service, tuple(sorted(cell_ids))), [InstanceName.of_wire(one) for one in evict])


def packed_ranked(found: Sequence[TokenLogprobs]) -> PackedRanked:
    """Pack what a teacher says about sequences, for the wire."""
    return PackedRanked(
        logprobs=pack_floats(one.logprobs for one in found),
        ranks=pack_ints(one.ranks for one in found),
        top_ids=pack_ints(one.top_ids for one in found),
        top_logprobs=pack_floats(one.top_logprobs for one in found),
    )


def _ask(task: PayloadTask, service: str, work_s: float, ask: Callable[[Engine, CallControl], T]) -> T:
    call, host = this_node().call(task.request.id), gpu().host
    with refusals():
        control = CallControl(work_s=_on_granted(work_s, call), cancelled=threading.Event())
        this_node().attach(call, lambda reason: control.cancelled.set())
        name = InstanceName(service, tuple(call.grant["cell_ids"]))
        evict = [InstanceName.of_wire(one) for one in call.grant["evict"]]
        timeout_s = call.header.get("timeout_s") or gpu().settings.timeout_s
        return Execution(call, control, timeout_s).answer(host, name, evict, ask)


def _on_granted(work_s: float, call: Call) -> float:
    """Return the seconds that `work_s` seconds on one cell take on the cells granted."""
    if not work_s:
        return 0.0
    header = {key: value for key, value in call.header.items() if key != "submitted_at"}
    return work_s / Action.from_header(header).curve.speedup(call.grant["units"])


def gpu() -> GpuContext:
    """Return the context of these tasks."""
    return context(GpuContext)
