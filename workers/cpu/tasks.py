"""The Celery tasks of a CPU node.

`cpu.open cpu.exec cpu.read_file cpu.write_file cpu.request cpu.snapshot cpu.close_session cpu.close`.
Arguments and results are those of the table in `tangram.wire`. The sandbox does the work; here it is put between a
call's grant and its result.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from app.action_task import Call, PayloadTask
from app.celery import app
from tangram import clock
from tangram.errors import ActionCancelled, ActionError, ActionFailed, EnvironmentLost
from tangram.wire import MEMORY_ENFORCED, WireAllowance
from workers.context import CpuContext, context, refusals
from workers.control import this_node
from workers.cpu.abstract import Environment, EnvironmentSpec, ExecOutcome, ExecRequest, WindowSize
from workers.cpu.dop import MOST_VARIABLE
from workers.cpu.errors import EnvironmentGone
from workers.cpu.excerpt import excerpt_of
from workers.cpu.memory.allowance import ActionMemory
from workers.cpu.opening import Opening
from workers.cpu.ports.exchange import HttpRequest
from workers.cpu.ports.wait import Wait
from workers.cpu.streams import OutputStream
from workers.regrants import holding_of
from workers.resumed import message_again


@app.task(name="cpu.open", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def open_environment(
    self: PayloadTask, environment: str, image: str | None = None, memory_mb: int | None = None, files: Any = None
) -> None:
    """Open an environment; `files` are those it starts with, base64 by path in a JSON object."""
    node = this_node()
    call = node.call(self.request.id)
    opening = Opening(call.header.get("timeout_s") or cpu().settings.open_timeout_s)
    spec = EnvironmentSpec(id=environment, image=image, memory_mb=memory_mb)
    node.attach(call, lambda reason: opening.cancel(reason, call.cancel_cause))
    try:
        with refusals():
            opened = opening.run(lambda: _opened(spec, files, opening), undo=Environment.close)
            # What was granted for the open ends here: what stays is held.
            with measured(call, opened):
                pass
    except ActionFailed as error:
        if error.cause != "sandbox_failed" or not call.grant.get("may_wait_again"):
            raise
        call.waits_again, call.status, call.reason, call.cause = True, error.status, error.reason, error.cause


def _opened(spec: EnvironmentSpec, files: Any, opening: Opening) -> Environment:
    """Open an environment and write its files; where that fails, it is closed again."""
    opened = cpu().sandbox.open(spec, opening)
    if files is None:
        return opened
    opening.phase = "writing the files that it starts with"
    try:
        for path, content in json.loads(cpu().blobs.get_text(files)).items():
            opening.check()
            opened.write_file(path, base64.b64decode(content))
    except BaseException:
        opened.close()
        raise
    return opened


@app.task(name="cpu.close", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def close_environment(self: PayloadTask, environment: str) -> None:
    """Close an environment; one that is gone already is closed."""
    cpu().close(environment)


@app.task(name="cpu.close_session", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def close_session(self: PayloadTask, environment: str, session: str, idle_only: bool = False) -> None:
    """Close a shell session; one that is gone already is closed."""
    with in_environment(self):
        cpu().sandbox.get(environment).close_session(session, idle_only=idle_only)


@app.task(name="tangram.close_environment", ignore_result=True)  # type: ignore[untyped-decorator]
def close_unasked(id: str, attempt: int, reason: str) -> None:
    """Close an environment whose trainer will not."""
    cpu().close(id)


@app.task(name="cpu.read_file", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def read_file(self: PayloadTask, environment: str, path: str, offset: int = 0, length: int | None = None) -> dict[str, Any]:
    """Read a file, or `length` bytes of it from `offset` on."""
    with in_environment(self):
        data = cpu().sandbox.get(environment).read_file(path, offset, length)
    return {"data": cpu().blobs.put(data)}


@app.task(name="cpu.write_file", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def write_file(self: PayloadTask, environment: str, path: str, data: Any, mode: int | None = None, offset: int = 0) -> None:
    """Write a file, from `offset` on."""
    content = cpu().blobs.get(data)
    with in_environment(self):
        cpu().sandbox.get(environment).write_file(path, content, mode, offset)
    cpu().blobs.drop(data)  # a large file in parts would fill the store


@app.task(name="cpu.request", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def send_request(
    self: PayloadTask, environment: str, port: int, path: str = "/", method: str = "GET", headers: Any = None, body: Any = None
) -> dict[str, Any]:
    """Have a server that runs in an environment answer an HTTP request; `headers` are pairs of names and values."""
    node, blobs = this_node(), cpu().blobs
    call = node.call(self.request.id)
    given = tuple((str(name), str(value)) for name, value in blobs.get_json(headers) or ())
    content = blobs.get(body) if body is not None else b""
    with Wait(call.header.get("timeout_s") or cpu().settings.timeout_s) as wait, in_environment(self):
        node.attach(call, lambda reason: wait.cancel(reason, call.cancel_cause))
        asked = HttpRequest(port=port, method=method, path=path, headers=given, body=content)
        opened = cpu().sandbox.get(environment)
        if opened.allowance is not None:
            wait.leave_out(opened.allowance.paused_s)
        with measured(call, opened):
            answer = opened.request(asked, holding_of(call.grant), wait)
    blobs.drop(body)
    return {"status": answer.status, "headers": blobs.put_json(answer.headers), "body": blobs.put(answer.body)}


@app.task(name="cpu.snapshot", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def snapshot(self: PayloadTask, environment: str) -> dict[str, Any]:
    """Keep the files of an environment as they are now."""
    with in_environment(self):
        return {"image": cpu().sandbox.snapshot(environment), "node": this_node().name}


@app.task(name="cpu.exec", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def execute(
    self: PayloadTask,
    environment: str,
    command: Any,
    session: str = "main",
    variables: Any = None,
    cwd: str | None = None,
    interpreter: Sequence[str] | None = None,
    merged: bool = False,
    fence: bool = False,
    stream: bool = False,
    stdin: bool = False,
    terminal: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Run a command on the cores of the grant; with `fence`, from a clean shell, after ending what earlier ones left running.

    With `stream`, what it prints is published while it runs; with `stdin` or a `terminal`, rows and columns, it can be given input.
    """
    node = this_node()
    call = node.call(self.request.id)
    limits = call.header
    printed = _printed_before(environment, call.id)
    with streamed(call, stream, printed or 0) as output, in_environment(self):
        try:
            text, own_variables = cpu().blobs.get_text(command), cpu().blobs.get_json(variables) or {}
        except ActionError:
            if printed is None:
                raise
            # What runs already needs neither. Without its variables, nothing of it may be shown.
            text, own_variables = "", None
        goes_on = cpu().sandbox.outlives_worker and not stdin and terminal is None
        request = ExecRequest(
            action_id=call.id,
            command=text,
            holding=holding_of(call.grant),
            dop=max(1, call.grant["units"]),
            cwd=cwd,
            interpreter=interpreter,
            merged=merged,
            fence=fence,
            session=session,
            timeout_s=limits.get("timeout_s") or cpu().settings.timeout_s,
            output_timeout_s=limits.get("output_timeout_s"),
            output_limit_bytes=cpu().settings.output_limit_bytes,
            output_tail_fraction=cpu().settings.output_tail_fraction,
            variables={
                MOST_VARIABLE: str(call.grant.get("most_units", call.grant["units"])),
                **({MEMORY_ENFORCED: "1"} if cpu().sandbox.enforces_memory else {}),
                **(own_variables or {}),
            },
            on_output=output.write if output is not None else None,
            is_held=output.is_full if output is not None else None,
            stdin=stdin,
            terminal=WindowSize(*terminal) if terminal is not None else None,
            message=message_again(self.request, call.grant) if goes_on else "",
        )
        opened = cpu().sandbox.get(environment)
        execution = opened.start(request)
        call.on_told = execution.note_told
        node.attach(call, execution.kill, execution.resize, execution.used)
        with cpu().inputs.to(call.id, execution.give), measured(call, opened):
            outcome = execution.wait()
        call.execution_s, call.background_s, call.slept_s = outcome.execution_s, outcome.background_s, outcome.slept_s
        call.cpu_s = outcome.cpu_s
        call.status, call.reason, call.cause = outcome.status, outcome.reason, outcome.cause
        if own_variables is not None:
            given = [*own_variables.values(), *(word.partition("=")[2] for word in interpreter or ())]  # SWE-ReX gives them to `env -i`
            call.excerpt = excerpt_of(outcome, request.command, given, cpu().settings.keep_output)
        if outcome.status == "lost":
            raise EnvironmentGone(f"environment {environment} is lost: {outcome.reason}", outcome.cause)
        if outcome.status == "cancelled":
            raise ActionCancelled(outcome.reason, call.cancel_cause or outcome.cause)
        if outcome.status == "failed":
            raise ActionFailed(outcome.reason, outcome.cause)
        return _value(outcome)


def _printed_before(environment: str, action_id: str) -> int | None:
    """Return how much a command has printed that the worker before this one has left; None where it has left none."""
    with suppress(EnvironmentGone):
        return cpu().sandbox.get(environment).printed_by(action_id)
    return None


@app.task(name="tangram.give", ignore_result=True)  # type: ignore[untyped-decorator]
def give(id: str, sender: str, number: int, what: list[Any]) -> None:
    """Give a running command input, a signal or another size of its terminal."""
    cpu().inputs.take(id, sender, number, what)


@app.task(name="tangram.allow", ignore_result=True)  # type: ignore[untyped-decorator]
def allow(epoch: int, allowances: list[WireAllowance]) -> None:
    """Let environments use more memory; see `tangram.wire`. One that is not here any more needs none."""
    for environment, allowance_mb, serial in allowances:
        with suppress(EnvironmentGone):
            if (allowance := cpu().sandbox.get(environment).allowance) is not None:
                allowance.allow(allowance_mb, (epoch, serial))


@contextmanager
def measured(call: Call, environment: Environment) -> Iterator[None]:
    """Give an environment the memory of the grant while an action runs; take note of what it held, and how long it was paused."""
    if (allowance := environment.allowance) is None:
        yield
        return
    before_s = allowance.paused_s()
    memory = ActionMemory()
    try:
        stamp = (call.grant["epoch"], call.grant.get("allowance_serial", 0))
        with allowance.action(call.grant.get("allowance_mb", 0), stamp) as memory:
            yield
    finally:
        call.memory_mb, call.resident_mb, call.allowed = memory.memory_mb, memory.resident_mb, memory.allowed
        if (paused_s := allowance.paused_s() - before_s) > 0:
            call.background_s, call.execution_s = paused_s, clock.monotonic() - call.began - paused_s


@contextmanager
def streamed(call: Call, wanted: bool, printed: int) -> Iterator[OutputStream | None]:
    """Give what takes in the output of a command after what it has `printed`, if that is wanted; say at the end how it has ended."""
    if not wanted:
        yield None
        return
    output = cpu().streams.open(call.id, printed)
    try:
        yield output
    except ActionError as error:
        output.end(error.status, error.reason, error.cause, getattr(error, "node", ""))
        raise
    except BaseException as error:
        output.end("failed", f"{type(error).__name__}: {error}", "worker_failed")
        raise
    output.end(call.status, call.reason, call.cause)


@contextmanager
def in_environment(task: PayloadTask) -> Iterator[None]:
    """Turn what a sandbox refuses into the end of an action of an environment.

    The scheduler stops the actions of an environment that it closes. So if an environment is gone and its action was not stopped, the
    environment has ended by itself.
    """
    node = this_node()
    call = node.call(task.request.id)
    with refusals():
        try:
            yield
        except EnvironmentGone as error:
            if call.cancel_reason:
                raise ActionCancelled(call.cancel_reason, call.cancel_cause) from error
            raise EnvironmentLost(str(error), node.name, error.cause) from error


def _value(outcome: ExecOutcome) -> dict[str, Any]:
    blobs = cpu().blobs
    return {
        "exit_code": outcome.exit_code,
        "stdout": blobs.put_printed(outcome.stdout),
        "stderr": blobs.put_printed(outcome.stderr),
        "truncated": outcome.truncated,
        "cpu_s": outcome.cpu_s,
        "max_rss_mb": outcome.max_rss_mb,
    }


def cpu() -> CpuContext:
    """Return what the worker set up for these tasks."""
    return context(CpuContext)
