"""Containers come, wait, are given, and go: also when the worker, the engine or somebody else ends them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sandboxes.test_life import of
from tests.workers_cpu.support import RUN, admit, printed, processes_with, run, until
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.keeper_container import LABEL
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import ContainerFailed, EnvironmentGone, ImageMissing

from .conftest import node_name
from .images import BUSYBOX, make_busybox
from .support import StuckEngine, box_of, containers, docker, engine, groups_of, processes_of, waits_for_its_worker, worker

pytestmark = pytest.mark.real

NAP = f"320.2917{RUN}"
NO_SHELL = "tangram-test-no-shell:1"


@pytest.mark.parametrize(
    "hold",
    [f"sleep {NAP} </run/tangram/alive & setsid sleep {NAP} &", f"sleep {NAP} <>/run/tangram/alive & true"],
    ids=["holds alive", "would write alive"],
)
def test_the_containers_of_a_killed_worker_go_by_themselves(tmp_path: Path, image: str, hold: str) -> None:
    node = node_name("killed")
    with worker(tmp_path / "box", node, image, hold, f"sleep {NAP}", warm={image: 1}) as killed:
        assert until(lambda: len(containers(node)) == 2 and all(map(waits_for_its_worker, containers(node))))
        before = containers(node)
        killed.kill()
        assert until(lambda: containers(node) == [])
        assert until(lambda: not any(processes_of(container) or groups_of(container) for container in before))
        assert processes_with(f"sleep\x00{NAP}") == []
    with box_of(tmp_path / "box", ContainerOptions(image=image, pull="never"), node) as box:
        assert printed(box.open(of("e1")), "echo again") == "again\n"


def test_a_container_that_starts_after_its_worker_was_killed_goes_by_itself(tmp_path: Path, image: str) -> None:
    node = node_name("killed-early")
    with worker(tmp_path / "box", node, image, "true", engine=StuckEngine()) as killed:
        assert until(lambda: bool(containers(node)))
        (container,) = containers(node)
        killed.kill()
        docker("start", container)
        assert until(lambda: containers(node) == [])


@pytest.mark.parametrize("keeper_image", ["tangram-test-missing:1", BUSYBOX])
def test_a_worker_says_so_whose_keeper_cannot_be_started_and_its_environments_end_with_it(
    tmp_path: Path, options: ContainerOptions, keeper_image: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Given an image that is not here, or one in which there is no Python
    node, known = node_name("keeper"), {"label": f"{LABEL}={node_name('keeper')}"}
    box = ContainerSandbox(tmp_path / "box", node=node, options=options, keep_s=60, keeper_image=keeper_image)
    with closing(box):
        (said,) = [message for message in caplog.messages if message.startswith("environments end with this worker")]
        assert "engine says" in said or "No such image" in said
        assert not box.outlives_worker and printed(box.open(of("e1")), "echo works") == "works\n"
    assert until(lambda: not engine().containers(all=True, filters=known))


def test_a_sandbox_leaves_the_containers_of_other_nodes(tmp_path: Path, options: ContainerOptions, env: ContainerEnvironment) -> None:
    with box_of(tmp_path / "other", options, node_name("other")):
        pass
    assert printed(env, "echo here") == "here\n"


def test_a_container_killed_from_outside_ends_its_command_and_its_environment(sandbox: ContainerSandbox, env: ContainerEnvironment) -> None:
    executions = [admit(env, "touch begun; sleep 300"), *(admit(env, ":") for _ in range(3))]
    with ThreadPoolExecutor(len(executions)) as threads:
        outcomes = [threads.submit(execution.wait) for execution in executions]
        assert until(lambda: "begun" in printed(env, "ls", session="look"))
        docker("kill", env.container.id)
        for outcome in outcomes:
            assert outcome.result(60).status == "lost", outcome
            assert "container ended" in outcome.result().reason
    assert until(lambda: sandbox.environments() == () and not env.container.control.exists())
    for use in (lambda: run(env, ":"), lambda: env.read_file("x"), lambda: env.write_file("x", b"")):
        with pytest.raises(EnvironmentGone, match="e1 is lost: its container ended"):
            use()
    with pytest.raises(EnvironmentGone):
        sandbox.get("e1")
    assert printed(sandbox.open(of("e1")), "ls") == ""


def test_an_image_that_cannot_be_had_or_has_no_shell_is_refused_in_one_line(sandbox: ContainerSandbox, tmp_path: Path) -> None:
    make_busybox(NO_SHELL, without=("sh",))
    words = {"no-such-image:9": "no-such-image", NO_SHELL: "/bin/sh"} | dict.fromkeys(["UPPER", "a b", "-x", "x@sha256:1", ":"], "")
    for reference, word in words.items():
        with pytest.raises((ImageMissing, ContainerFailed)) as caught:
            sandbox.open(of("e1", image=reference))
        assert "\n" not in str(caught.value) and word in str(caught.value), reference
    assert sandbox.environments() == ()
    assert until(lambda: containers(node_name()) == [])
    assert list((tmp_path / "box" / "control").iterdir()) == []


def test_an_environment_of_less_memory_than_any_container_may_have_stands(sandbox: ContainerSandbox) -> None:
    # When an environment wants 1 MB; then it has the least that there is, and what a program makes of that is the program's affair
    env = sandbox.open(of("e1", memory_mb=1))
    assert run(env, "echo here").stdout == b"here\n"
    assert run(env, "tail /dev/zero").cause == "out_of_memory"


Warm = Callable[[int], AbstractContextManager[ContainerSandbox]]


@pytest.fixture
def warm(tmp_path: Path, options: ContainerOptions, image: str) -> Warm:
    """Give a maker of sandboxes in which so many containers are to stand ready."""
    return lambda count: box_of(tmp_path / "box", replace(options, warm={image: count}))


def stands_ready(box: ContainerSandbox, image: str, count: int = 1) -> bool:
    return until(lambda: box._pool.standing(image) == count)


def test_what_stands_ready_is_filled_up_and_not_beyond(warm: Warm, image: str) -> None:
    with warm(2) as box:
        assert stands_ready(box, image, 2)
        for number in range(3):
            box.open(of(f"e{number}"))
        seen: set[int] = set()

        def is_full() -> bool:
            seen.add(len(containers(node_name())))
            return box._pool.standing(image) == 2

        assert until(is_full)
        assert len(containers(node_name())) == 5 and max(seen) <= 5
    assert until(lambda: containers(node_name()) == [])


def test_one_that_stood_ready_and_was_killed_or_is_to_have_what_no_container_can_is_not_given(warm: Warm, image: str) -> None:
    with warm(1) as box:
        assert stands_ready(box, image)
        (killed,) = containers(node_name())
        docker("kill", killed)
        environment = box.open(of("e1"))
        assert environment.container.id != killed
        assert printed(environment, "echo well") == "well\n"
        # When one wants more memory than the engine can count; then it is refused, and nothing is left of the one that it would have had
        assert stands_ready(box, image)
        with pytest.raises(ContainerFailed):
            box.open(of("e2", memory_mb=1 << 44))
        assert until(lambda: box._pool.standing(image) == 1 and len(containers(node_name())) == 2)


def test_one_that_stood_ready_has_the_memory_of_who_takes_it(warm: Warm, image: str) -> None:
    with warm(1) as box:
        # Then 48 MB are too much for the smaller, and not for the larger
        for name, memory_mb, stdout in (("e1", 24, b""), ("e2", 256, b"48000000\n")):
            assert stands_ready(box, image)
            ready = {*containers(node_name())}
            environment = box.open(of(name, memory_mb))
            assert environment.container.id in ready
            assert run(environment, "x=$(head -c 48000000 /dev/zero | tr '\\0' x); echo ${#x}").stdout == stdout
            limit = docker("inspect", "-f", "{{.HostConfig.Memory}} {{.HostConfig.MemorySwap}}", environment.container.id)
            assert limit.split() == [str(memory_mb << 20)] * 2
            environment.close()
