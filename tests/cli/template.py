"""Commands of the system as forks of a process that has imported its modules: half of the CPU time of a fresh process.

`Forked` is a `subprocess.Popen` for `python -P -m tangram …`, and for `tangram-docker` as a module. The template is a process of its own,
as a process of tests has threads and applications of Celery, which a fork must not begin with. What it forks is a child of the process of
the tests all the same: its first parent ends at once, and the process of the tests takes over orphans meanwhile. Such a child ends as every
Python process does.

A command that starts a stack has a template of its own, which is a fork of it, so that the processes of the stack are forks, too.

The template has nothing of `app.celery`, whose application has the addresses of the environment in which it was imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from app.local.processes import Process

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-P", "-m", "tangram"]
DOCKER = [*PROGRAM[:3], "tangram.integrations.docker_cli"]
MAINS = {"tangram": "tangram.__main__", "tangram.integrations.docker_cli": "tangram.integrations.docker_cli"}
"""The modules that have the `main` of each program."""
MODULES = (
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.thread",
    "celery.events.state",
    "celery.loaders.app",
    "celery.worker.consumer",
    "celery.worker.strategy",
    "kombu.transport.redis",
    "sqlalchemy.dialects.sqlite",
    "tangram.integrations.docker_cli",
    "app.action_task",
    "app.broker.transport",
    "app.cli.demo",
    "app.cli.draining",
    "app.event_log",
    "app.journal.leader",
    "app.journal.retention",
    "app.local.stack",
    "app.preconditions",
    "app.replay.record_command",
    "app.replay.replay_command",
    "scheduler.live.service",
    "scheduler.policies",
    "workers.api.requests",
    "workers.context",
    "workers.cpu.root",
    "workers.cpu.streams",
    "workers.gpu.host",
    "workers.node",
)
"""What processes of the system import, and what makes no application."""
LATER = {"gateway": "app.gateway.server", "web": "app.web.server"}
"""What only some commands import: the template does so when the first of them is asked for."""
STACKS = ("demo", "plan", "replay", "up")
"""Commands that may start a stack."""
PARAMETERS = [*inspect.signature(subprocess.Popen._execute_child).parameters][1:]  # type: ignore[attr-defined]
"""What `subprocess` hands to the method that starts a process; further versions of Python may add to it."""
REFUSED = {"executable": None, "preexec_fn": None, "pass_fds": (), "shell": False, "process_group": -1, "umask": -1}
REFUSED |= dict.fromkeys(("uid", "gid", "gids"))
"""Arguments that a fork cannot honour, with their defaults."""

PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Orders:
    """Orders for a template."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._turn = threading.Lock()

    def fork(self, order: dict[str, Any], standard: list[int]) -> int:
        """Start a command with these standard files; return the number of its process."""
        with self._turn:
            _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._orders, [json.dumps(order).encode()], standard)
                number, adopted = self._orders.recv(64), self._orders.recv(64)
            except BaseException:  # the test's time is over; an answer that comes later must not be taken for the next one's
                template.cache_clear()
                self._give_up()
                raise
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert adopted, "the template has ended"
        return int(number)

    def _give_up(self) -> None:
        """Give no more orders, and end what the last one has started, or is about to start."""
        with contextlib.suppress(OSError, ValueError):
            self._orders.settimeout(5)
            os.kill(int(self._orders.recv(64)), signal.SIGKILL)
        self._orders.close()


class Template(Orders):
    """The template's process, and orders for it."""

    def __init__(self) -> None:
        """Start it; it ends with this process."""
        orders, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(orders)
        env = {name: value for name, value in os.environ.items() if not name.startswith("TANGRAM_")}
        argv = [sys.executable, "-c", "from tests.cli.template import serve; serve()", str(its_end.fileno())]
        with its_end:
            self._process = subprocess.Popen(argv, cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}, pass_fds=[its_end.fileno()])
        atexit.register(self.close)

    def close(self) -> None:
        """Have it end."""
        self._orders.close()
        self._process.wait(60)


_inherited: list[Orders] = []
"""The template of a process that is itself a fork of one, and may start a stack."""


@cache
def template() -> Orders:
    """Return the template of this process."""
    return _inherited[0] if _inherited else Template()


class Forked(subprocess.Popen[Any]):
    """A command in a fork of the template, if it is one of the system's; else a usual process."""

    def _execute_child(self, *given: Any) -> None:
        named = dict(zip(PARAMETERS, given, strict=True))
        args, env = list(named["args"]), named["env"]
        if args[:4] not in (PROGRAM, DOCKER):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        unknown = [name for name, default in REFUSED.items() if named.get(name, default) != default]
        assert not unknown, f"a fork knows nothing of {unknown}"
        files = [named[end] for end in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        standard = [file if file != -1 else number for number, file in enumerate((files[0], files[3], files[5]))]
        order = {
            "main": MAINS[args[3]],
            "words": args[4:],
            "cwd": str(named["cwd"] or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": named["start_new_session"],
        }
        try:
            self.pid = template().fork(order, standard)
            self._child_created = True
        finally:
            self._close_pipe_fds(*files)  # type: ignore[attr-defined]


def serve() -> None:
    """Import modules, then fork a child for each order; in a child, run the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[0] = str(ROOT)
    for name in MODULES:
        importlib.import_module(name)
    assert "app.celery" not in sys.modules
    gc.collect()
    gc.freeze()
    order, files = _next_order(socket.socket(fileno=int(sys.argv[1])))
    if order["words"][:1] and order["words"][0] in STACKS:
        ours, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            its_end.close()
            _inherited.append(Orders(ours))
            Process.start_child = Forked
        else:
            ours.close()
            for file in files:
                os.close(file)
            order, files = _next_order(its_end)
    _become(order, files)
    importlib.import_module(order["main"]).main()


def _next_order(orders: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a child for each order, in which this returns it with the standard files; end once there are no more."""
    with orders:
        while True:
            text, files, _, _ = socket.recv_fds(orders, 1 << 20, 3)
            if not text:
                os._exit(0)
            order = json.loads(text)
            for word in order["words"][:1]:
                if word in LATER:
                    importlib.import_module(LATER[word])
            between = os.fork()
            if between == 0:
                first = os.getpid()
                child = os.fork()
                if child:
                    try:
                        orders.send(str(child).encode())
                    except OSError:  # whoever gave the order has given up
                        os.kill(child, signal.SIGKILL)
                    os._exit(0)
                while os.getppid() == first:
                    time.sleep(0.0005)
                return order, files
            os.waitpid(between, 0)
            with contextlib.suppress(OSError):
                orders.send(b"adopted")
            for file in files:
                os.close(file)


def _become(order: dict[str, Any], files: list[int]) -> None:
    """Take on what a process is given by whoever starts it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored where the tests run under `nohup`
    if order["session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = ["tangram", *order["words"]]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        raw: Any = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        binary = io.BufferedReader(raw) if number == 0 else raw if unbuffered else io.BufferedWriter(raw)
        errors = "backslashreplace" if number == 2 else "strict"
        lines = number == 2 or os.isatty(number)
        setattr(sys, name, io.TextIOWrapper(binary, "utf-8", errors, line_buffering=lines, write_through=unbuffered))
