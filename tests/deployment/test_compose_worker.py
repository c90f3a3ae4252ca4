"""The CPU worker of docker-compose.yml as a container: its environments go on when compose replaces it, and end when it is gone for good.

Its container is the service of that file. Only what has no registry here is another: its image has this machine's Python, and it sees the
packages that are installed here. It has no network, but the socket of a Redis. The test that takes the workers away comes last.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from app.journal.database import sqlite_url
from app.journal.migrating import upgrade
from app.local.kept_environments import END
from app.local.processes import Command, Process
from tangram import Client, Settings
from tangram.wire import node_label
from tests.conftest import RedisUrls, running_redis
from tests.containers.conftest import need_containers
from tests.containers.images import BUSYBOX, make_busybox, make_with_python
from tests.containers.support import containers, docker, engine, processes_of
from tests.deployment.support import ROOT, environment, services, tool
from tests.engines.waiting import until
from tests.needed import needed
from workers.cpu.docker.cgroups.choice import ControlGroups
from workers.cpu.docker.engine import DockerEngine
from workers.cpu.docker.keeper_container import LABEL, start_keeper

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

WAIT_S = 120.0
WORKERS = 2
BIN = Path(sys.executable).parent
OWN = {
    **{"TANGRAM_CORES": "4", "TANGRAM_MEMORY_MB": "512", "TANGRAM_CONTAINER_MEMORY_MB": "64", "TANGRAM_BEAT_S": "1"},
    **{"TANGRAM_IMAGE": BUSYBOX, "TANGRAM_IMAGE_PULL": "never", "TANGRAM_HAND_OVER_S": "1", "TANGRAM_NODE_LOST_S": "120"},
}
WAITED_FOR_SHORTLY = {"TANGRAM_NODE_LOST_S": "2"}
"""What compose replaces the containers for that have not this setting yet."""


class Stack:
    """A scheduler as a process, and CPU workers as compose's containers, in a folder."""

    def __init__(self, folder: Path, redis: RedisUrls) -> None:
        self.folder, self.urls = folder, {"TANGRAM_BROKER_URL": redis.broker, "TANGRAM_RESULT_URL": redis.result}
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("TANGRAM_")}
        self.project, self.file = f"tangram-test-{uuid4().hex[:8]}", folder / "worker.yml"
        self.nodes = [f"{engine().info()['Name']}-{self.project}-cpu-worker-{number + 1}" for number in range(WORKERS)]
        self.service = service(folder, redis.socket.parent, self.urls)

    def scheduler(self) -> Process:
        """Start the scheduler, with a journal of its own."""
        upgrade(url := sqlite_url(self.folder / "journal"))
        own = {**self.urls, "TANGRAM_DATABASE_URL": url, "TANGRAM_BEAT_S": OWN["TANGRAM_BEAT_S"]}
        return Process(Command("scheduler", (str(BIN / "tangram"), "scheduler"), own), log=self.folder / "log", env=self.variables)

    def client(self) -> Client:
        urls = {name.removeprefix("TANGRAM_").lower(): value for name, value in self.urls.items()}
        return Client(job="compose", settings=Settings(state_dir=self.folder, **urls))

    def compose(self, *words: str, **settings: str) -> None:
        """Run compose on the service, from now on with more settings."""
        self.service["environment"].update(settings)
        self.file.write_text(yaml.safe_dump({"services": {"cpu-worker": self.service}}))
        argv = [*tool(), "--project-name", self.project, "--file", str(self.file), *words]
        done = subprocess.run(argv, env=self.variables, cwd=self.folder, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr

    def up(self, *words: str, **settings: str) -> None:
        """Have compose start the workers."""
        self.compose("up", "--detach", "--scale", f"cpu-worker={WORKERS}", *words, **settings)

    def until_up(self) -> None:
        """Wait until the nodes have joined."""

        def joined() -> set[str]:
            with closing(sqlite3.connect(f"file:{self.folder / 'journal'}?mode=ro", uri=True)) as connection:
                return {name for (name,) in connection.execute("select name from nodes where state = 'up'")}

        try:
            until(lambda: joined() == set(self.nodes), WAIT_S, 0.5)
        except AssertionError:
            logs = [docker("logs", "--tail", "40", worker) for worker in self.workers()]
            raise AssertionError("\n".join([(self.folder / "log").read_text()[-3000:], *logs])) from None

    def workers(self) -> list[str]:
        """Return the containers of the workers, in their order."""
        labels = [f"com.docker.compose.project={self.project}", "com.docker.compose.service=cpu-worker"]
        found = engine().containers(all=True, filters={"label": labels})
        return [each["Id"] for each in sorted(found, key=lambda each: int(each["Labels"]["com.docker.compose.container-number"]))]

    def keepers(self) -> list[str]:
        """Return the containers that keep environments."""
        return [each["Id"] for node in self.nodes for each in engine().containers(all=True, filters={"label": f"{LABEL}={node}"})]

    def beside(self) -> list[str]:
        """Return the containers of environments, and of those that keep them."""
        return [each for node in self.nodes for each in containers(node)] + self.keepers()


def service(folder: Path, redis: Path, urls: Mapping[str, str]) -> dict[str, Any]:
    """Return the service as the file has it, but for what is said above."""
    found = services(**OWN, TANGRAM_STATE_DIR=str(folder / "state"))["cpu-worker"]
    for name in ("build", "depends_on", "networks"):
        found.pop(name, None)
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        found["cgroup"] = "host"
    own = {
        str(each) for each in map(Path, (*sys.path, sys.prefix, sys.base_prefix, ROOT)) if each.is_dir() and not each.is_relative_to("/usr")
    }
    seen = [*sorted(own - {"."}), *(each for each in ("/usr", "/lib", "/lib64") if Path(each).exists())]
    return {
        **found,
        "image": worker_image(),
        "network_mode": "none",
        "environment": {**environment(found), **urls, "PATH": f"{BIN}:/usr/bin:/bin"},
        "volumes": [*found["volumes"], *(f"{each}:{each}:ro" for each in seen), f"{redis}:{redis}"],
    }


def worker_image() -> str:
    """Import an image with this Python and the files of this checkout, where they are here, and return its name."""
    name = f"tangram-test-worker-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}:1"
    files = {str(path).lstrip("/"): path for room in ("app", "workers") for path in sorted((ROOT / room).rglob("*.py"))}
    make_with_python(name, more=files, links={str(each).lstrip("/"): os.path.realpath(each) for each in BIN.glob("python*")})
    return name


@pytest.fixture(scope="module")
def stack(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Give a scheduler and two CPU workers of compose's."""
    need_containers()
    needed("" if tool() else "there is no compose")
    make_busybox()
    with running_redis() as redis, ExitStack() as undo:
        made = Stack(tmp_path_factory.mktemp("compose"), redis)
        undo.callback(made.scheduler().stop, 30)
        undo.callback(remove, made)
        made.up()
        made.until_up()
        yield made


def remove(stack: Stack) -> None:
    """Remove all that is left."""
    stack.compose("kill")
    stack.compose("down")
    for container in stack.beside():
        with suppress(subprocess.CalledProcessError):  # It has gone meanwhile.
            docker("rm", "--force", container)


class Rollout:
    """An environment with a shell, a file and a program in the background, and a command that runs until it is let go."""

    def __init__(self, client: Client, node: str, number: int) -> None:
        self.number = number
        self.env = client.open(trajectory=f"t{number}", requires=[node_label(node)], queue_timeout_s=WAIT_S)
        self.env.exec(f"kept={number}; echo text > ~/file; sleep 1000 & echo $! > ~/background; mkfifo ~/go ~/begun; cd /tmp")
        self.runs = self.env.submit("echo > ~/begun; read line < ~/go; echo once >> ~/marks; cat ~/marks", session="runs")
        self.env.exec("read line < ~/begun", session="other")

    def goes_on(self) -> bool:
        """Say whether all of it is there, and the command has run once when it is let go."""
        shown = self.env.exec("echo $kept; pwd; cat ~/file; kill -0 $(cat ~/background) && echo runs", queue_timeout_s=WAIT_S).stdout
        self.env.exec("echo > ~/go", session="other")
        result = self.runs.result(WAIT_S)
        return (shown, result.stdout) == (f"{self.number}\n/tmp\ntext\nruns\n", "once\n")


def test_a_worker_has_the_rights_that_files_ends_and_terminals_of_its_environments_need(stack: Stack) -> None:
    with stack.client() as client, client.open(trajectory="rights") as env:
        env.write_file("note", b"kept")
        late = env.exec("cat note; sleep 60 & wait", timeout_s=8)
        assert (late.status, late.stdout) == ("timed_out", "kept")
        typed = env.submit("test -t 0 && tty; read line; echo $line", pty=(24, 80))
        typed.send_input(b"typed\r")
        # The terminal shows what is typed as it comes, before the command reads it.
        assert sorted(typed.result(WAIT_S).stdout.split()) == ["/dev/pts/0", "typed", "typed"]


def test_environments_and_commands_go_on_when_compose_replaces_the_workers_containers(stack: Stack) -> None:
    with stack.client() as client:
        # Given environments on both nodes, which are named after what stays
        rollouts = [Rollout(client, stack.nodes[number % WORKERS], number) for number in range(3)]
        before, beside = stack.workers(), set(stack.beside())
        # And whose check, of the file, finds them
        kind, *look = stack.service["healthcheck"]["test"]
        assert kind == "CMD" and "answers" in docker("exec", before[0], *look)
        # When compose makes the containers afresh
        stack.up("--force-recreate")
        # Then they are others, and nothing beside them is
        assert not set(before) & set(stack.workers()) and set(stack.beside()) == beside
        assert all(rollout.goes_on() for rollout in rollouts)
        for rollout in rollouts:
            rollout.env.close()


def test_they_go_on_when_the_keeper_was_killed_before_the_container_is_replaced(stack: Stack) -> None:
    with stack.client() as client:
        # Given rollouts of which one begins something after the keepers were killed, and one does not
        opens, waits = (Rollout(client, node, number) for number, node in enumerate(stack.nodes))
        docker("kill", *stack.keepers())
        until(lambda: not stack.keepers(), WAIT_S)
        opens.env.exec("mkfifo ~/late", session="other")
        late = opens.env.submit("echo begun; echo > ~/late; read line < ~/late; echo ended", session="late")
        opens.env.exec("read line < ~/late", session="other")
        # When compose makes the containers afresh; then they go on, with all output
        stack.up("--force-recreate")
        opens.env.exec("echo > ~/late", session="other", queue_timeout_s=WAIT_S)
        assert late.result(WAIT_S).stdout == "begun\nended\n"
        assert opens.goes_on() and waits.goes_on()
        for rollout in (opens, waits):
            rollout.env.close()


def test_they_go_on_when_the_container_of_a_worker_is_killed(stack: Stack) -> None:
    with stack.client() as client:
        killed, other = (Rollout(client, node, number) for number, node in enumerate(stack.nodes))
        docker("kill", stack.workers()[0])
        stack.up(**WAITED_FOR_SHORTLY)
        assert killed.goes_on() and other.goes_on()
        for rollout in (killed, other):
            rollout.env.close()


def test_a_keeper_is_started_also_where_no_container_can_be_called_like_the_node(stack: Stack, tmp_path: Path) -> None:
    node, docker_engine = f"two words: {uuid4().hex}", DockerEngine()
    kept = start_keeper(docker_engine, stack.service["image"], node, tmp_path, WAIT_S, WAIT_S)
    assert len(docker_engine.labelled(LABEL, node)) == 1
    # When its worker closes
    with kept.channel:
        kept.channel.send(END)
    os.close(kept.lock)
    until(lambda: not docker_engine.labelled(LABEL, node), WAIT_S)


def test_nothing_is_left_once_the_workers_are_gone_for_good_also_of_what_is_paused(stack: Stack) -> None:
    with stack.client() as client:
        # Given environments that wait for the next worker for seconds, of which one is paused
        stack.up(**WAITED_FOR_SHORTLY)
        for number, node in enumerate(stack.nodes):
            Rollout(client, node, number)
        beside = stack.beside()
        (container,) = containers(stack.nodes[1])
        ControlGroups(sorted(os.sched_getaffinity(0)))(engine().inspect_container(container)["State"]["Pid"]).controls().freeze()
        # When they go; then so does all that is beside them
        stack.compose("down")
        until(lambda: not stack.beside(), WAIT_S)
        assert not [pid for each in beside for pid in processes_of(each)]
