"""The commands that run processes of a deployment, or all of them, and the one that takes a node out of service."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from app.cli import output
from app.cli.common import AsJson, UsageError, app, importing, log_to_stderr, make_state_dir, stop_on_signals
from tangram.errors import StackUnreachable, TangramError
from tangram.settings import Settings

Include = Annotated[list[str] | None, typer.Option(help="A further module with Celery tasks; may be repeated.")]


@app.command()
def up(
    policy: Annotated[str | None, typer.Option(help="elastic, paper, fcfs, fixed:N or static:N; by default TANGRAM_POLICY.")] = None,
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="CPU nodes.")] = 1,
    cores: Annotated[int | None, typer.Option(min=1, max=100_000, help="Cores per node; by default those of this machine.")] = None,
    cells: Annotated[int, typer.Option(min=1, max=1000, help="GPU cells of the GPU node.")] = 2,
    include: Include = None,
) -> None:
    """Run the whole system on this machine.

    The embedded stack runs in the state folder until Ctrl-C. A process of it that ends is started again.
    """
    from app.cli.demo import tiny_services
    from app.local import stack
    from app.services_file import check_models, load_services_file
    from scheduler.policies import make_policy

    settings = Settings()
    policy = policy or settings.policy
    make_policy(policy)
    if include:  # else each worker ends, is started again and is given up, as do those that read a services file
        _import_all(include)
    if settings.services_file is not None:
        check_models(settings.services_file, load_services_file(settings.services_file))
    for name in ("gateway_port", "web_port", "metrics_port"):
        if port := getattr(settings, name):
            _check_free(port, f"TANGRAM_{name.upper()}", settings.stack_file)
    if settings.shards > nodes:
        raise UsageError(f"TANGRAM_SHARDS={settings.shards}: each shard needs a CPU node, name as many with --nodes")
    if given := [name for name in ("broker_url", "result_url", "database_url") if getattr(settings, name)]:
        names = ", ".join(f"TANGRAM_{name.upper()}" for name in given)
        output.note(f"this stack has addresses of its own: unset {names}, or commands and clients go there instead")
    make_state_dir(settings.state_dir)
    services_file = settings.services_file or tiny_services(settings.state_dir, output.note)
    plan = stack.StackPlan(
        policy=policy,
        nodes=nodes,
        cores=cores,
        cells=cells if services_file else 0,
        services_file=services_file,
        gateway_port=settings.gateway_port,
        web_port=settings.web_port,
        metrics_port=settings.metrics_port,
        shards=settings.shards,
        include=tuple(include or ()),
    )
    stop = stop_on_signals()
    with stack.start(plan, settings.state_dir) as started:
        bare = stack.wait_until_up(started, plan, wait=lambda ready, timeout_s: started.supervise(stop, output.note, ready, timeout_s))
        if stop.is_set():
            return
        output.note(f"the stack is up in {started.state_dir}: {', '.join(plan.node_names())}; Ctrl-C ends it")
        if plan.gateway_port is not None:
            output.note(f"the gateway is at {plan.gateway_url}; `tangram token new --job J` makes a token")
        if plan.web_port is not None:
            output.note(f"the live page is at {plan.web_url}")
        if started.metrics:
            where = ", ".join(f"{name} {address}" for name, address in started.metrics.items())
            output.note(f"metrics: {where}; Prometheus finds them by {started.metrics_file}")
        if bare:
            output.note(f"environments of {', '.join(bare)} share /tmp and see what your user sees: bubblewrap would set them apart")
        started.supervise(stop, output.note)


def _import_all(modules: Sequence[str]) -> None:
    """Import what `--include` names. Raises `UsageError` where that is no module."""
    from celery.utils.imports import cwd_in_path

    if not all(modules):
        raise UsageError("--include is empty: name a module")
    for module in modules:
        try:
            with cwd_in_path():
                importlib.import_module(module)
        except ModuleNotFoundError as error:
            if f"{module}.".startswith(f"{error.name}."):
                raise UsageError(f"--include {module}: there is no module {error.name}") from error
            raise


def _check_free(port: int, setting: str, stack_file: Path) -> None:
    """Raise `UsageError` where a port of this machine is taken, with its holder's id where that can be seen.

    What a stack of this folder holds is free: the start refuses a second one by name, and stops what one that crashed has left.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"{setting}: port {port} cannot be used: {error.strerror}") from error
            from psutil import CONN_LISTEN, AccessDenied, net_connections

            from app.local.embedded import StackFile
            from tangram.connection import read_stack_file

            pids = set[int | None]()
            with contextlib.suppress(AccessDenied):
                pids = {one.pid for one in net_connections("tcp") if one.status == CONN_LISTEN and one.laddr[1:] == (port,)}
            with contextlib.suppress(StackUnreachable):
                if pids and pids <= {*read_stack_file(stack_file, StackFile).pids.values()}:
                    return
            holder = "".join(f" (pid {pid})" for pid in pids if pid)
            raise UsageError(f"{setting}: port {port} is taken by another program{holder}: choose another one") from error


@app.command()
def scheduler() -> None:
    """Run a scheduler; further ones stand by."""
    with importing():
        from app.scheduler_process import run

    log_to_stderr()
    run(Settings(), stop_on_signals())


@app.command()
def worker(
    pool: Annotated[str, typer.Argument(help="cpu, gpu or api.")],
    include: Include = None,
    log_level: Annotated[str, typer.Option(help="Celery's log level.")] = "WARNING",
) -> None:
    """Run the worker of a node."""
    if pool not in ("cpu", "gpu", "api"):
        raise UsageError(f"worker {pool!r} is none of cpu, gpu, api")
    if log_level.upper() not in logging.getLevelNamesMapping():
        raise UsageError(f"--log-level {log_level!r} is none of DEBUG, INFO, WARNING, ERROR, CRITICAL")
    settings = Settings()
    if pool != "cpu" and settings.shard:
        raise UsageError(f"TANGRAM_SHARD={settings.shard}: shards other than 0 have CPU workers only")
    with importing():
        start = importlib.import_module("workers.start")
    _import_all(include or ())  # first, as a worker that cannot begin ends the environments that it has adopted
    start.run(pool, settings, tuple(include or ()), log_level)


@app.command()
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for any, which the log names.")] = 8089,
) -> None:
    """Serve clients of other systems over HTTP.

    Any number of processes may do so.
    """
    _serve_http("gateway", "the gateway", host, port)


@app.command()
def web(
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for any, which the log names.")] = 8090,
) -> None:
    """Serve the live page.

    It shows what runs, what waits and why, and what fails.
    """
    _serve_http("web", "the live page", host, port)


def _serve_http(package: str, what: str, host: str, port: int) -> None:
    """Run the server of `app.PACKAGE`, whose libraries are in the extra PACKAGE; `what` names it in an error. Raises `TangramError`."""
    from app.cli.state import database_of

    log_to_stderr()
    try:
        with importing():
            server = importlib.import_module(f"app.{package}.server")
    except ModuleNotFoundError as error:
        raise TangramError(f"{what} needs {error.name}: pip install 'arl-tangram-server[{package}]'") from error
    settings = Settings()
    try:
        server.serve(settings, database_of(settings), host, port)
    except OSError as error:
        if isinstance(error, TangramError):
            raise
        if error.errno != errno.EADDRINUSE:
            raise TangramError(f"{host} port {port} cannot be used: {error.strerror or error}") from error
        setting = f"TANGRAM_{package.upper()}_PORT"
        problem = "the port is taken by another program: choose another one"
        raise TangramError(f"{problem}, with --port or the setting {setting} of `tangram up`") from error


@app.command()
def metrics() -> None:
    """Serve Celery's events to Prometheus.

    It counts the events of Celery's workers, at TANGRAM_METRICS_PORT.
    """
    from app.celery import make_app
    from app.preconditions import needed_for_metrics, require_broker

    log_to_stderr()
    settings = Settings()
    if settings.metrics_port is None:
        raise UsageError("set TANGRAM_METRICS_PORT to the port to listen at")
    with needed_for_metrics():
        from app.metrics.celery_events import run
    celery = make_app(settings)
    require_broker(celery, settings.connect_timeout_s)
    run(celery, settings, stop_on_signals())


@app.command()
def health(part: Annotated[str, typer.Argument(help="scheduler, cpu, gpu or api.")]) -> None:
    """Check a process of this host.

    Exit code 0 says that the process of a deployment does its work. This is for health checks.
    """
    from app.cli.health import PROCESSES, check_health

    found = next((known for known in PROCESSES if known == part), None)
    if found is None:
        raise UsageError(f"{part!r} is none of {', '.join(PROCESSES)}")
    print(check_health(found, Settings()))


@app.command()
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of the node, as `tangram status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Put the node back into service.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Wait until nothing is left; exit 1 where something is after so long."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take a node out of service.

    What is there comes to its end, and nothing else begins there. The actions and environments that are left are printed. Environments
    live on, with their actions, until they are closed.
    """
    from app.cli.draining import drain_node

    if undo and wait is not None:
        raise UsageError("--wait is for draining, not for --undo")
    empty = drain_node(Settings(), node, wait, draining=not undo, as_json=as_json)
    if wait is not None and not empty:
        raise typer.Exit(1)
