"""E2B's `/process.Process`: commands of a sandbox, each one an action.

The time limit of `Start` is that of the action, its wait in the queue included. A command whose connection breaks goes on until then, and
can be joined with `Connect` by its number, through any copy of the gateway, and given input and signals. Once it has ended, `Connect` finds
it for `ENDED_S` more, and gives its output, too, which E2B does not keep.

A command runs as the sandbox's own user, whoever the request names.

At E2B, a process has the same number inside of the sandbox, and clients such as verifiers send signals by a command. So a command that is
`kill -TERM NUMBER` or `kill -KILL NUMBER` and nothing else is a signal to that process, if it runs. Then it does nothing itself.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
import time
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from app.gateway import calls
from app.gateway.context import gateway_of
from app.gateway.e2b import RpcError, Sandbox, SandboxOf, access_token_of, checked_sandbox, named_sandbox, sandbox_of
from app.gateway.e2b_connect import STREAM_TYPE, connect_errors, end_of_stream, envelope, envelopes, limit_of, only_message, parsed
from app.gateway.e2b_messages import (
    Input,
    InputMessage,
    SelectMessage,
    Selector,
    SignalMessage,
    StartMessage,
    StreamInputMessage,
    UpdateMessage,
)
from app.gateway.e2b_output import answer, end_of
from app.gateway.e2b_table import Process, Program, Table
from app.gateway.errors import NotFound
from app.gateway.shape import shape_router
from tangram import input_messages
from tangram.action import Action, command_class
from tangram.calls import execute
from tangram.handles import Handle
from tangram.wire import GIVEN_BYTES

UNLIMITED_S = 24 * 3600.0
"""Longest time that a command without a limit may run, seconds. Its sandbox's lease is over sooner."""

_SUBMIT_S = 60.0
"""Seconds until an action that was submitted is in the journal at the latest."""

_KILL = re.compile(r"kill -(TERM|KILL) (\d{1,9})", re.ASCII)

_running: set[asyncio.Task[None]] = set()
router = shape_router("e2b", connect_errors, prefix="/process.Process", tags=["e2b"])


@router.post("/Start")
async def start(request: Request) -> Response:
    """Run a program and stream what becomes of it.

    The step that begins the process looks at the token, too. Only in front of a large body the token is looked at by itself.
    """
    message = parsed(StartMessage, await only_message(request, partial(sandbox_of, request)))
    args = message.process.args
    asked = _KILL.fullmatch(args[-1]) if args[-2:-1] == ["-c"] else None
    if asked and await _was_sent(await sandbox_of(request), asked[1], int(asked[2])):
        args[-1] = ":"
    limit_s, now = limit_of(request), time.time()
    program = Program(
        **message.process.model_dump(),
        tag=message.tag,
        stdin=message.stdin,
        terminal=None if message.pty is None else (message.pty.size.rows, message.pty.size.cols),
        started_at=now,
        ends_at=None if limit_s is None else now + limit_s,
        word=secrets.token_hex(8),
    )
    gateway, named = await gateway_of(request), named_sandbox(request)
    table = gateway.tables.of(named)
    record, process = await table.begin(program, access_token_of(request))
    if record is not None:
        gateway.records.note(record)
    elif await gateway.records.read(named) is not None:  # the store had lost it
        record, process = await table.begin(program, access_token_of(request))
    try:
        sandbox = await checked_sandbox(request, record)
        assert process is not None, "the sandbox is open, and the token is its own"
        action = await calls.put_aside(sandbox.caller, _action(sandbox, program, process.session_name))
        handle = calls.submit(sandbox.caller, action, key=process.key, is_new=True)
    except BaseException:
        if process is not None:
            await asyncio.shield(table.remove(process))
        raise
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(_attend(handle, process, table, ended))
    _running.add(running)
    running.add_done_callback(_running.discard)
    return await answer(request, sandbox, process, handle, ended)


@router.post("/Connect")
async def connect(request: Request, sandbox: SandboxOf) -> Response:
    """Stream what becomes of a process that runs, or has ended lately; a time limit ends the stream, not the process."""
    selector = parsed(SelectMessage, await only_message(request)).process
    try:
        process = await _find(sandbox, selector)
    except (RpcError, NotFound):
        if (ended := await sandbox.processes.ended(selector.pid, selector.tag)) is None:
            raise
        process = ended
    action = _action(sandbox, process.program, process.session_name)
    handle = calls.submit(sandbox.caller, action, key=process.key)
    return await answer(request, sandbox, process, handle, None)


@router.post("/List")
async def list_processes(sandbox: SandboxOf) -> dict[str, Any]:
    """Return the processes that run."""
    table = sandbox.processes
    running = [process for process in await table.all() if await _is_alive(sandbox, process, table)]
    if not running:
        await _check_stands(sandbox)
    return {"processes": [_shown(process) for process in running]}


@router.post("/SendSignal")
async def send_signal(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Send SIGTERM to a process, or end it with all that it has started."""
    message = parsed(SignalMessage, await request.body())
    process = await _find(sandbox, message.process)
    await _signal(sandbox, process, kill=message.signal not in ("SIGNAL_SIGTERM", signal.SIGTERM))
    return {}


async def _was_sent(sandbox: Sandbox, name: str, number: int) -> bool:
    """Send a signal to the process of a number, and say whether there is one."""
    try:
        process = await _find(sandbox, Selector(pid=number))
    except (RpcError, NotFound):
        return False
    await _signal(sandbox, process, kill=name == "KILL")
    return True


async def _signal(sandbox: Sandbox, process: Process, *, kill: bool) -> None:
    """Send SIGTERM to a process, or end it with all that it has started."""
    if not kill:
        await _give(sandbox, process, input_messages.signal_of(signal.SIGTERM))
        return
    await sandbox.processes.note_killed(process)
    sandbox.caller.session.cancel_task(_task_id(sandbox, process))


@router.post("/SendInput")
async def send_input(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Give a process input."""
    message = parsed(InputMessage, await request.body())
    await _send(sandbox, await _find_open_reader(sandbox, message.process), message.input)
    return {}


@router.post("/StreamInput")
async def stream_input(request: Request, sandbox: SandboxOf) -> Response:
    """Give a process input as it comes; the first message names the process."""
    process: Process | None = None
    async for raw in envelopes(request):
        message = parsed(StreamInputMessage, raw)
        if message.start is not None:
            process = await _find_open_reader(sandbox, message.start.process)
        if message.data is not None:
            if process is None:
                raise RpcError("invalid_argument", "the first message is to name the process")
            await _send(sandbox, process, message.data.input)
    return Response(envelope({}) + end_of_stream(), media_type=STREAM_TYPE)


@router.post("/CloseStdin")
async def close_stdin(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """End the input of a process."""
    process = await _find_reader(sandbox, parsed(SelectMessage, await request.body()).process)
    if process.program.terminal is None:
        await sandbox.processes.note_closed(process)
    await _give(sandbox, process, input_messages.end())
    return {}


@router.post("/Update")
async def update(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Give the terminal of a process another size."""
    message = parsed(UpdateMessage, await request.body())
    process = await _find(sandbox, message.process)
    if process.program.terminal is None:
        raise RpcError("invalid_argument", f"process {process.pid} has no terminal")
    if message.pty is not None:
        await _give(sandbox, process, input_messages.size(message.pty.size.rows, message.pty.size.cols))
    return {}


@router.post("/{method}", include_in_schema=False)
async def not_served(method: str) -> None:
    """Refuse other methods."""
    raise RpcError("unimplemented", f"process.Process/{method} is not served here")


def _action(sandbox: Sandbox, program: Program, session: str) -> Action:
    left_s = UNLIMITED_S if program.ends_at is None else max(program.ends_at - program.started_at, 0.001)
    *interpreter, command = program.cmd, *program.args
    # Clients wrap commands in a login shell.
    inner = command if interpreter[-1:] == ["-c"] else program.cmd
    return execute(
        sandbox.record.place,
        command,
        interpreter=interpreter,
        cwd=program.cwd,
        session=session,
        units=sandbox.record.units,
        timeout_s=left_s,
        queue_timeout_s=None if program.ends_at is None else left_s,
        variables={**sandbox.record.variables, **program.envs},
        action_class=command_class(inner),
        stream=True,
        stdin=program.stdin,
        pty=program.terminal,
    )


async def _attend(handle: Handle[Any], process: Process, table: Table, ended: asyncio.Future[None]) -> None:
    """Wait for the end of a process, which is at its time limit at the latest. Then set `ended`, and remove the process from the table.

    The answer to the caller does not wait for the removal. The next call of this copy of the gateway does, so it finds no process that has
    ended.
    """
    settled = end_of(handle)
    try:
        limit_s = None if process.program.ends_at is None else process.program.ends_at - time.time()
        await asyncio.wait([settled], timeout=limit_s)
        if not settled.done():
            handle.cancel()
            await settled
    finally:
        ended.set_result(None)
        await table.end(process)


async def _find(sandbox: Sandbox, selector: Selector) -> Process:
    """Return a process that runs. Raises `RpcError`."""
    table = sandbox.processes
    if selector.tag:
        process = next((one for one in await table.all() if one.program.tag == selector.tag), None)
    else:
        process = await table.find(selector.pid)
    if process is None or not await _is_alive(sandbox, process, table):
        await _check_stands(sandbox)
        raise RpcError("not_found", f"process with {f'tag {selector.tag}' if selector.tag else f'pid {selector.pid}'} not found")
    return process


async def _check_stands(sandbox: Sandbox) -> None:
    """Raise `NotFound` where the sandbox has ended by itself. A client would take a missing process for one that has ended."""
    await sandbox.gateway.environments.look(sandbox.caller, sandbox.record.id)


async def _find_reader(sandbox: Sandbox, selector: Selector) -> Process:
    """Return a process that runs and reads input. Raises `RpcError`."""
    process = await _find(sandbox, selector)
    if not process.program.stdin and process.program.terminal is None:
        raise RpcError("invalid_argument", f"process {process.pid} was started without stdin")
    return process


async def _find_open_reader(sandbox: Sandbox, selector: Selector) -> Process:
    """Return a process that runs and whose input nobody has closed. Raises `RpcError`."""
    process = await _find_reader(sandbox, selector)
    if process.is_closed:
        raise RpcError("failed_precondition", f"the stdin of process {process.pid} was closed")
    return process


async def _send(sandbox: Sandbox, process: Process, given: Input) -> None:
    data = given.stdin + given.pty
    for at in range(0, len(data), GIVEN_BYTES):
        await _give(sandbox, process, input_messages.data(data[at : at + GIVEN_BYTES]))


async def _give(sandbox: Sandbox, process: Process, what: input_messages.What) -> None:
    """Give a process something, in the order of the calls; return once the broker has it. Raises `StackUnreachable`."""
    await asyncio.wrap_future(sandbox.caller.session.give(_task_id(sandbox, process), what).sent)


async def _is_alive(sandbox: Sandbox, process: Process, table: Table) -> bool:
    """Say whether a process runs; one whose copy of the gateway has died without noting its end is removed.

    One that the journal does not know has perhaps never begun, so nobody may join it any more.
    """
    if time.time() - process.program.started_at < _SUBMIT_S:
        return True
    known = await sandbox.gateway.journal.action(_task_id(sandbox, process))
    if known is not None and known.status in ("waiting", "running"):
        return True
    await (table.remove(process) if known is None else table.end(process))
    return False


def _task_id(sandbox: Sandbox, process: Process) -> str:
    return sandbox.caller.task_id("cpu.exec", sandbox.record.id, process.key)


def _shown(process: Process) -> dict[str, Any]:
    program = process.program
    config = {"cmd": program.cmd, "args": program.args, "envs": program.envs} | ({"cwd": program.cwd} if program.cwd else {})
    return {"pid": process.pid, "config": config} | ({"tag": program.tag} if program.tag else {})
