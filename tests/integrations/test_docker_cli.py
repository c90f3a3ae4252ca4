"""The command `tangram-docker`, as a program that expects `docker` calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tangram.integrations import docker_cli
from tests.cli.support import finished
from tests.cli.template import DOCKER, Forked
from tests.clients.rows import shows
from tests.integrations.conftest import standing
from tests.live.support import Live

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("live")]
Docker = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def docker(live: Live) -> Docker:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return lambda *arguments: finished(Forked([*DOCKER, *arguments], text=True, **pipes))


@pytest.fixture
def container(live: Live, docker: Docker) -> Iterator[str]:
    opened = docker("run", "-d", "--rm", "--name", "mine", "-w", "down", "-e", "A=1", "-m", "128m", "any/image:1", "sleep", "2h")
    assert opened.returncode == 0 and opened.stderr == "tangram-docker: no node has containers: image any/image:1 is a label only\n"
    yield opened.stdout.strip()
    docker("rm", "-f", opened.stdout.strip())


def test_a_container_is_an_environment_that_begins_with_its_name_and_has_its_memory(live: Live, container: str) -> None:
    assert container.startswith("mine-")
    live.until(lambda: container in standing(live))
    ((job, trajectory, memory_mb, client),) = live.rows(
        f"select job, trajectory, memory_mb, client from environments where id = '{container}'"
    )
    assert (job, trajectory, memory_mb) == ("docker", container, 128) and not client


@shows("tangram-docker", "run -d, exec, cp, stop, rm", "works; of Docker's command line, what programs call that know nothing else")
def test_exec_has_folder_variables_streams_and_exit_code(docker: Docker, container: str) -> None:
    done = docker("exec", container, "bash", "-c", "basename $PWD; echo $A; echo bad >&2; exit 7")
    assert (done.stdout, done.stderr, done.returncode) == ("down\n1\n", "bad\n", 7)
    assert docker("exec", container, "bash", "-c", "head -c 3000000 /dev/zero | tr '\\0' x").stdout == "x" * 3_000_000
    done = docker("exec", "-w", "/testbed", container, "bash", "-c", "exit 1")
    assert (done.stdout, done.stderr, done.returncode) == ("", "tangram-docker: exec failed: cwd '/testbed' does not exist\n", 125)
    done = docker("exec", "-w", ".", "-e", "A=2", container, "bash", "-lc", "ls; echo $A")
    assert (done.stdout, done.returncode) == ("down\n2\n", 0)


@shows("tangram-docker", "run -d, exec, cp, stop, rm")
def test_files_are_copied_in_and_out(docker: Docker, container: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b").write_bytes(b"\x00\xff")
    assert docker("cp", str(tmp_path / "in"), f"{container}:down").returncode == 0
    assert docker("exec", container, "ls").stdout == "a b\n"
    assert docker("cp", f"{container}:down/a b", str(tmp_path / "out" / "c")).returncode == 0
    assert (tmp_path / "out" / "c").read_bytes() == b"\x00\xff"
    assert docker("cp", f"{container}:nowhere", str(tmp_path / "out" / "d")).returncode == 125


@shows("tangram-docker", "run -d, exec, cp, stop, rm")
def test_a_container_that_was_stopped_can_be_removed_and_runs_nothing(live: Live, docker: Docker, container: str) -> None:
    assert docker("stop", container).stdout == f"{container}\n"
    assert docker("rm", "-f", container).returncode == 0
    done = docker("exec", container, "true")
    assert done.returncode == 125 and done.stderr.startswith(f"tangram-docker: exec failed: environment {container} was closed")
    live.until(lambda: container not in standing(live))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "image"], "give -d"),
        (["run", "-d", "image", "nginx"], "it takes `sleep …`"),
        (["run", "-d", "--privileged", "image"], "unrecognized arguments"),
        (["run", "-d", "-m", "much", "image"], "not like 512m"),
        (["run", "-d", "-w", "/proc/nowhere", "image"], "cannot be made so"),
        (["exec", "env-x"], "name the command"),
        (["exec", "env-x", "true"], "environment env-x is unknown"),
        (["cp", "a", "b"], "CONTAINER:PATH"),
        (["images"], "invalid choice"),
    ],
)
def test_what_it_does_not_do_is_one_line_and_125(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["tangram-docker", *words])
    with pytest.raises(SystemExit) as ended:
        docker_cli.main()
    lines = [line for line in capfd.readouterr().err.splitlines() if "label only" not in line]
    assert ended.value.code == 125 and len(lines) == 1 and lines[0].startswith("tangram-docker: ") and said in lines[0]


def test_what_nobody_expects_is_said_before_the_code_of_a_failure(executable: str) -> None:
    environment = {**os.environ, "TANGRAM_TIMEOUT_S": "soon"}
    done = subprocess.run([executable, "rm", "any"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 125 and done.stderr.startswith("tangram-docker: failed: ") and "timeout_s" in done.stderr


def test_a_killed_exec_takes_its_command_with_it(live: Live, executable: str, container: str) -> None:
    running = subprocess.Popen([executable, "exec", container, "bash", "-c", "touch started; sleep 300"])
    running_now = f"select id from actions where environment = '{container}' and status = 'running'"
    live.until(lambda: live.rows(running_now))
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    live.until(lambda: not live.rows(running_now), timeout_s=40)  # by itself it would be cancelled after TANGRAM_ORPHAN_S, a minute
    assert subprocess.run([executable, "rm", "-f", container], check=True, capture_output=True, text=True).stdout == f"{container}\n"
