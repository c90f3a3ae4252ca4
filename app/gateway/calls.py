"""How a shape submits an action and waits for it.

```python
result = await calls.run(caller, action, key=key, request=request)
```

| parameter | what it does |
|---|---|
| `key` | submitted again under the same key, by whatever process, the action runs once and both calls get its result; needs `request` |
| `request` | where its connection breaks, the action is cancelled; not so with a `key`, as the caller may come again |

A call waits as long as it takes and holds its connection. What goes wrong is raised as a `GatewayError`. The ids of the
actions are noted for the line of the access log.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from app.gateway.errors import Cancelled, KeyReused, classify
from app.gateway.sessions import Caller, digest
from tangram.action import Action
from tangram.errors import TangramError
from tangram.handles import Handle
from tangram.results import Chunk
from tangram.wire import RESULT_TTL_S

LARGE = 256 * 1024
"""Size of an argument from which on it is put into the result store on a thread, so that nobody waits behind it."""

_NUMBER_BYTES = 8
_KEY_PREFIX = "tangram-gw-key-"

noted_actions: ContextVar[list[str] | None] = ContextVar("noted_actions", default=None)
"""The ids of the actions of the call that is being served; None outside of calls."""


def submit(caller: Caller, action: Action, *, key: str | None = None, is_new: bool = False) -> Handle[Any]:
    """Submit an action without waiting for it; parameters as for `run`. `is_new` says that nobody has used the key before."""
    task_id = None if key is None else caller.task_id(action.kind, action.environment or "", key)
    handle = caller.session.submit(replace(action, job=caller.job), task_id, is_new=is_new)
    note(handle.id)
    return handle


def note(action_id: str) -> None:
    """Note an action for the access log's line of the call that is being served."""
    noted = noted_actions.get()
    if noted is not None:
        noted.append(action_id)


async def run(caller: Caller, action: Action, *, key: str | None = None, request: Request | None = None) -> Any:
    """Submit an action and return its result.

    Its job becomes that of the caller. A `key` is unique within job, kind of action and environment. Raises `GatewayError` as
    `app.gateway.errors.classify` says of how the action ended.
    """
    if key is not None and request is not None:
        await check_key(request, caller.task_id(action.kind, action.environment or "", key))
    try:
        handle = submit(caller, await put_aside(caller, action), key=key)
    except TangramError as error:
        raise classify(error) from error
    return await wait(handle, cancel=key is None, request=request if key is None else None)


async def check_key(request: Request, scope: str) -> None:
    """Note which request an idempotency key stands for, within what is asked for under `scope`.

    Raises `KeyReused` where that was another one before, and what redis-py raises.
    """
    body = await request.body()
    hashed = await asyncio.to_thread(hashlib.sha256, body) if len(body) > LARGE else hashlib.sha256(body)
    asked = digest(request.method, str(request.scope["raw_path"]), str(request.scope["query_string"]), hashed.hexdigest())
    store, key = request.app.state.gateway.store, _KEY_PREFIX + scope
    if not await store.set(key, asked, nx=True, ex=RESULT_TTL_S):
        known = await store.getex(key, ex=RESULT_TTL_S)
        if known is not None and known != asked.encode():
            raise KeyReused()


async def put_aside(caller: Caller, action: Action) -> Action:
    """Return an action whose large arguments are in the result store already. Raises as `Session.put_aside`."""
    if any(size(value) > LARGE for value in action.arguments.values()):
        return await asyncio.to_thread(caller.session.put_aside, action)
    return action


def size(value: object) -> int:
    """Return about how many bytes a value takes in a message."""
    if isinstance(value, (bytes, bytearray, memoryview, str)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(size, value.values()))
    return sum(map(size, value)) if isinstance(value, (list, tuple)) else _NUMBER_BYTES


async def wait(handle: Handle[Any], *, cancel: bool = True, request: Request | None = None) -> Any:
    """Return the result of a submitted action; with `cancel` it ends when this wait does. Raises as `run`."""
    future = asyncio.wrap_future(handle.future)
    gone = asyncio.ensure_future(disconnected(request)) if request is not None else None
    try:
        if gone is not None:
            await asyncio.wait([future, gone], return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                handle.cancel()
                raise Cancelled(f"the caller of action {handle.id} is gone")
        return await future
    except asyncio.CancelledError:
        if cancel:
            handle.cancel()
        raise
    except TangramError as error:
        raise classify(error) from error
    finally:
        # Nobody looks at these again; the action's own future is not touched.
        future.cancel()
        if gone is not None:
            gone.cancel()


async def next_chunk(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    """Return the next piece of a command's output; None at the end, however the command has ended: its result says that."""
    try:
        return await anext(chunks, None)
    except TangramError:
        return None


async def disconnected(request: Request) -> None:
    """Return once the connection of a request whose body has been read is broken."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
