"""The services of docker-compose.yml as plain processes, with its command lines and variables, and the smoke check on them.

Only what a container would have of its own is another: addresses, ports, folders, and the node's name. The deployment is shared;
tests that end a service come last.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from uuid import uuid4

import pytest
from redis import Redis, RedisError

from app.local.processes import Command, Process, wait_until
from tests.conftest import RedisUrls, redis_binary
from tests.containers.images import BUSYBOX, busybox, make_busybox
from tests.deployment.support import PASSWORDS, ROOT, environment, services
from tests.engines.waiting import until
from tests.ports import free_port
from tests.sql.conftest import postgres_url

__all__ = ["postgres_url"]

LONG_RUNNING = ("cpu-worker", "api-worker", "scheduler", "flower")
"""Those whose check waits for an answer come first, so that few checks of the others, each a process, fail before these are up."""
BIN = Path(sys.executable).parent


@dataclass
class Deployment:
    """Services as processes."""

    config: dict[str, dict[str, Any]]
    folder: Path
    host: str
    flower_port: int
    processes: dict[str, Process]
    replaced: dict[str, str]

    def variables(self, name: str) -> dict[str, str]:
        """Return the whole process environment of a service."""
        base = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
        path = f"{BIN}:{Path(redis_binary()).parent}:{os.environ['PATH']}"
        ours = environment(self.config[name])
        for key, value in self.replaced.items():
            if key in ours:
                ours[key] = value
        image = {"TANGRAM_STATE_DIR": str(self.folder / name), "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        # A container has a host name of its own, after which its node is called.
        image["TANGRAM_NODE_NAME"] = f"{self.host}-{name}"
        return {**base, "PATH": path, **image, **ours}

    def run(self, name: str, argv: list[str], timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command to its end as in the container of a service."""
        return subprocess.run(argv, cwd=ROOT, env=self.variables(name), capture_output=True, text=True, timeout=timeout_s, check=False)

    def start(self, name: str, argv: list[str]) -> Process:
        """Start a command as in the container of a service."""
        log = self.folder / f"{name}.log"
        self.processes[name] = Process(Command(name, tuple(argv)), log=log, env=self.variables(name))
        return self.processes[name]

    def look(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run the health check of a service."""
        kind, *argv = self.config[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return self.run(name, [word.replace("5555", str(self.flower_port)) for word in argv])

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {name}\n" + "\n".join(process.log_tail(15)) for name, process in self.processes.items())


@pytest.fixture(scope="module")
def deployment(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Run Redis, the migration and the services, each as compose would, with environments that are sandboxes of processes."""
    folder, redis_port, flower_port = tmp_path_factory.mktemp("deployment"), free_port(), free_port()
    config = services(
        REDIS_ADDRESS=f"127.0.0.1:{redis_port}", TANGRAM_STATE_DIR=str(folder / "state"), TANGRAM_CORES="2", TANGRAM_IMAGE=BUSYBOX
    )
    with ExitStack() as stop:
        replaced = {
            "TANGRAM_DATABASE_URL": postgres_url,
            "TANGRAM_SANDBOX": "process",
            "FLOWER_ADDRESS": "127.0.0.1",
            "FLOWER_PORT": str(flower_port),
        }
        made = Deployment(config, folder, f"deployment-{uuid4().hex[:8]}", flower_port, {}, replaced)
        stop.callback(lambda: [process.stop(10) for process in reversed(made.processes.values())])
        script = config["redis"]["command"][2].replace("$$", "$").replace("dir /data", f"dir {folder}\nport {redis_port}\nbind 127.0.0.1")
        made.start("redis", ["sh", "-c", script])
        with Redis(port=redis_port, password=PASSWORDS["REDIS_PASSWORD"]) as client:
            assert wait_until(lambda: _answers(client), 60), made.logs()
        migrated = made.run("migrate", config["migrate"]["command"])
        assert migrated.returncode == 0, migrated.stderr
        for name in LONG_RUNNING:
            made.start(name, config[name]["command"])
        become_healthy(made)
        yield made


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def become_healthy(deployment: Deployment, names: Sequence[str] = LONG_RUNNING) -> None:
    """Run compose's own checks of services that have just been started until they pass."""
    for name in names:
        try:  # each look is a process, as in a container
            until(lambda name=name: deployment.look(name).returncode == 0, 90, longest_pause_s=1.0)  # type: ignore[misc]
        except AssertionError:
            raise AssertionError(f"{name}\n{deployment.logs()}") from None


def test_the_smoke_check_of_what_is_healthy_passes(deployment: Deployment) -> None:
    smoke = deployment.run("scheduler", [sys.executable, "-m", "app.smoke"])
    assert smoke.returncode == 0, f"{smoke.stdout}{smoke.stderr}{deployment.logs()}"
    assert [line.split()[0] for line in smoke.stdout.splitlines()] == ["ok"] * 8
    # And nobody has failed on the way, or has said a password
    for process in deployment.processes.values():
        text = process.log.read_text()
        assert "Traceback" not in text and not any(password in text for password in PASSWORDS.values()), process.name


def test_the_same_holds_where_environments_are_containers(deployment: Deployment) -> None:
    if busybox() is None or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        # Not a failure in CI, where the tests of containers have a run and an engine of their own.
        pytest.skip("no Docker engine answers, or there is no statically linked busybox")
    make_busybox()
    # Given the deployment with another CPU worker, whose sandbox is the one that the file names
    deployment.processes["cpu-worker"].stop(30)
    assert environment(deployment.config["cpu-worker"])["TANGRAM_SANDBOX"] == "docker"
    del deployment.replaced["TANGRAM_SANDBOX"]
    deployment.start("cpu-worker", deployment.config["cpu-worker"]["command"])
    become_healthy(deployment, ["cpu-worker"])
    test_the_smoke_check_of_what_is_healthy_passes(deployment)


def test_redis_asks_for_the_password(deployment: Deployment) -> None:
    url = deployment.variables("api-worker")["TANGRAM_BROKER_URL"]
    with Redis.from_url(url.replace(f":{PASSWORDS['REDIS_PASSWORD']}@", "")) as client, pytest.raises(RedisError, match=r"(?i)auth"):
        client.ping()


def test_flower_asks_for_the_password(deployment: Deployment) -> None:
    with pytest.raises(HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{deployment.flower_port}/api/workers", timeout=60)
    assert refused.value.code in (401, 403)


def test_the_check_of_a_worker_that_has_ended_fails(deployment: Deployment) -> None:
    deployment.processes["api-worker"].stop(30)
    # Then its check fails, in one line
    looked = deployment.look("api-worker")
    assert looked.returncode != 0 and "does not answer" in looked.stderr
    assert len(looked.stderr.splitlines()) == 1


def test_the_check_of_a_scheduler_fails_where_none_leads(deployment: Deployment) -> None:
    deployment.processes["scheduler"].stop(30)
    looked = deployment.look("scheduler")
    assert looked.returncode != 0 and "no scheduler leads" in looked.stderr


def test_the_smoke_check_ends_at_the_first_thing_that_fails(redis_urls: RedisUrls) -> None:
    urls = {"TANGRAM_BROKER_URL": redis_urls.broker, "TANGRAM_RESULT_URL": redis_urls.result, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "app.smoke"], env={**os.environ, **urls}, capture_output=True, text=True, timeout=200, check=False
    )
    # Then it says what is there, and first what is not
    assert done.returncode == 1
    assert [line.partition(":")[0].split(maxsplit=1) for line in done.stdout.splitlines()] == [
        ["ok", "broker and result store"],
        ["FAIL", "scheduler"],
    ]
