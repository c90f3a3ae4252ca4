"""The command `tangram-docker`: in the place of `docker`, for programs that start their containers with it.

    MSWEA_DOCKER_EXECUTABLE=tangram-docker mini-extra swebench …

A container is an environment of the stack, and its id is the environment's. It is opened detached: it stands until `stop` or `rm`, or
until nothing has used it for `TANGRAM_LEASE_S`. So nothing is kept on this machine between two invocations. It belongs to the job of
`TANGRAM_DOCKER_JOB`, `docker` by default. Its id begins with the `--name` that it was given, so a list of environments says whose it is.

| exit code | meaning |
|---|---|
| that of the command | `exec` ran it |
| 124 | `exec` ended it, as it took longer than `TANGRAM_TIMEOUT_S` |
| 137 | programs brought it to nothing, by filling the memory or the disk of the environment, or the kernel killed it |
| 125 | the stack failed, or the arguments are wrong, or some output is missing: nothing was found out about the command |

Folders without a leading `/` start at the environment's own folder; a process sandbox can write to no other. Commands of one container
run one after another. Where a program kills `tangram-docker exec`, even with SIGKILL, the command in the environment is cancelled too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import re
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

from tangram.aio import AsyncClient
from tangram.calls import Place, execute
from tangram.errors import ActionRejected, TangramError
from tangram.handles import AsyncHandle
from tangram.integrations import actions
from tangram.integrations.sandbox import KILLED, Sandbox
from tangram.results import ExecResult

TIMED_OUT, FAILED = 124, 125

_KEEPERS = ("sleep", "tail")
_PR_SET_PDEATHSIG = 1
_MEMORY_MB = {"": 1 / 1024**2, "b": 1 / 1024**2, "k": 1 / 1024, "m": 1.0, "g": 1024.0}


class UsageError(TangramError):
    """Raised when the arguments ask for what this command does not do."""


def main() -> NoReturn:
    """Run the command line and exit as the table says."""
    arguments = _parser().parse_args()
    sys.exit(_guarded(lambda: asyncio.run(_main(arguments))))


async def _main(arguments: argparse.Namespace) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    work: Callable[[AsyncClient, argparse.Namespace], Awaitable[int]] = arguments.work
    try:
        async with AsyncClient(os.environ.get("TANGRAM_DOCKER_JOB") or "docker") as client:
            return await work(client, arguments)
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except (TangramError, OSError) as error:
        is_theirs = isinstance(error, TangramError) and error.fault == "program"
        print(f"tangram-docker: {error}" if is_theirs else f"tangram-docker: {arguments.command} failed: {error}", file=sys.stderr)
        return KILLED if is_theirs else FAILED


async def _run(client: AsyncClient, arguments: argparse.Namespace) -> int:
    """Open an environment and print its id; its session `main` keeps the variables of what is run in it."""
    if not arguments.detach:
        raise UsageError("containers run in the background: give -d")
    if arguments.words and arguments.words[0] not in _KEEPERS:
        raise UsageError(
            f"a container runs what `exec` gives it; as its own command it takes `sleep …`, not {shlex.join(arguments.words)!r}"
        )
    memory_mb = None if arguments.memory is None else _memory_mb(arguments.memory)
    try:
        action = actions.open_detached(client.job, arguments.name or "", image=arguments.image, label=arguments.image, memory_mb=memory_mb)
        await (await client.submit(action))
    except ActionRejected as error:
        if not actions.lacks_containers(error):
            raise
        print(f"tangram-docker: no node has containers: image {arguments.image} is a label only", file=sys.stderr)
        action = actions.open_detached(client.job, arguments.name or "", label=arguments.image, memory_mb=memory_mb)
        await (await client.submit(action))
    sandbox = Sandbox(client, Place(client.job, action.trajectory, action.environment or ""))
    try:
        await _prepare(sandbox, arguments.workdir, _variables(arguments.env))
    except BaseException:
        with contextlib.suppress(TangramError):
            await asyncio.shield(sandbox.close())
        raise
    print(sandbox.id, flush=True)
    return 0


async def _prepare(sandbox: Sandbox, folder: str, variables: dict[str, str]) -> None:
    steps = [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
    if folder:
        quoted = shlex.quote(folder if folder.startswith("/") else "./" + folder)
        steps.append(f"mkdir -p {quoted} && cd {quoted}")
    if steps:
        done = await sandbox.run(execute(sandbox.place, " && ".join(steps), session="main", action_class="container"))
        if done.exit_code != 0:
            raise UsageError(f"the container cannot be made so: {(done.stderr or done.reason).strip()}")


async def _exec(client: AsyncClient, arguments: argparse.Namespace) -> int:
    if not arguments.words:
        raise UsageError("name the command to run")
    sandbox = _sandbox(client, arguments.container)
    *interpreter, command = arguments.words
    folder = arguments.workdir if arguments.workdir[:1] in ("", "/") else f"~/{arguments.workdir}"
    given = _variables(arguments.env)
    action = execute(sandbox.place, command, cwd=folder, interpreter=interpreter, session="main", variables=given, stream=True)
    handle: AsyncHandle[ExecResult] = await client.submit(action)
    missing, streams = 0, {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    try:
        async for chunk in handle.output():
            missing += chunk.dropped
            streams[chunk.stream].write(chunk.data)
            streams[chunk.stream].flush()
        done = await handle
    except asyncio.CancelledError:
        await handle.cancel()
        raise
    if missing:
        raise TangramError(f"{missing} bytes of what the command printed are missing: the result store was away for too long")
    if done.exit_code is None:
        print(f"tangram-docker: exec ended the command: {done.reason or 'its time was over'}", file=sys.stderr)
        return TIMED_OUT
    if done.reason:
        print(f"tangram-docker: {done.reason}", file=sys.stderr)
    return done.exit_code


async def _remove(client: AsyncClient, arguments: argparse.Namespace) -> int:
    """Close environments and print their ids; one that is closed already counts as removed."""
    for container in arguments.containers:
        await _sandbox(client, container).close()
        print(container)
    return 0


async def _copy(client: AsyncClient, arguments: argparse.Namespace) -> int:
    """Copy a file or a folder in or out: a folder's contents go into the target, which is made."""
    (source_id, source), (target_id, target) = _end(arguments.source), _end(arguments.target)
    if bool(source_id) == bool(target_id):
        raise UsageError("name one path as CONTAINER:PATH and the other one without a container")
    if target_id:
        await _sandbox(client, target_id).upload(Path(source), target)
    else:
        await _sandbox(client, source_id).download(source, Path(target))
    return 0


def _end(text: str) -> tuple[str, str]:
    container, colon, path = text.partition(":")
    return (container, path) if colon and "/" not in container else ("", text)


def _sandbox(client: AsyncClient, container: str) -> Sandbox:
    return Sandbox(client, Place(client.job, container, container))


def _variables(given: list[str]) -> dict[str, str]:
    """Read `NAME=TEXT`, and `NAME` for a variable of this process where it is set, as docker does."""
    pairs = [(name, text if equals else os.environ.get(name)) for name, equals, text in (each.partition("=") for each in given)]
    for name, _ in pairs:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UsageError(f"-e: {name!r} cannot be the name of a variable")
    return {name: text for name, text in pairs if text is not None}


def _memory_mb(text: str) -> int:
    """Read an amount of memory as docker writes it: bytes, or with one of the letters b, k, m, g."""
    match = re.fullmatch(r"(\d+)([bkmg]?)", text.lower())
    if match is None or (memory_mb := int(int(match[1]) * _MEMORY_MB[match[2]])) < 1:
        raise UsageError(f"--memory: {text!r} is not like 512m")
    return memory_mb


def _guarded(work: Callable[[], int]) -> int:
    """Do the work in a child process that is asked to stop when this one dies, in whatever way, and return its exit code."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() == parent:
                code = work()
            sys.stdout.flush()
            sys.stderr.flush()
        except BrokenPipeError:
            pass
        except Exception as error:  # os._exit swallows it otherwise
            code = FAILED
            print(f"tangram-docker: failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tangram-docker", description="containers as environments of a Tangram stack", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, work: Callable[..., Any], help_text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help_text, allow_abbrev=False)
        added.set_defaults(work=work)
        return added

    run = command("run", _run, "open an environment and print its id")
    run.add_argument("-d", "--detach", action="store_true")
    run.add_argument("--rm", action="store_true", help="taken and without effect: a container that ends is gone")
    run.add_argument("--name", type=_name, help="how its id begins")
    run.add_argument("-m", "--memory", help="memory that is reserved for it, such as 512m")
    run.add_argument("image", metavar="IMAGE")
    execute_in = command("exec", _exec, "run a command in an environment")
    execute_in.add_argument("container", metavar="CONTAINER")
    for each in (run, execute_in):
        each.add_argument("-w", "--workdir", default="", help="folder in which commands start")
        each.add_argument("-e", "--env", action="append", default=[], metavar="NAME=TEXT")
        each.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    stop = command("stop", _remove, "close environments")
    stop.add_argument("-t", "--time", type=int, help="taken and without effect")
    remove = command("rm", _remove, "close environments")
    remove.add_argument("-f", "--force", action="store_true", help="taken and without effect")
    remove.add_argument("-v", "--volumes", action="store_true", help="taken and without effect")
    for each in (stop, remove):
        each.add_argument("containers", nargs="+", metavar="CONTAINER")
    copy = command("cp", _copy, "copy a file, or the contents of a folder, in or out")
    copy.add_argument("source", metavar="[CONTAINER:]SOURCE")
    copy.add_argument("target", metavar="[CONTAINER:]TARGET")
    for each in commands.choices.values():
        each.exit_on_error = True
        each.error = _refuse  # type: ignore[method-assign]
    parser.error = _refuse  # type: ignore[method-assign]
    return parser


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a name")
    return text


def _refuse(message: str) -> NoReturn:
    print(f"tangram-docker: {message}", file=sys.stderr)
    sys.exit(FAILED)


if __name__ == "__main__":
    main()
