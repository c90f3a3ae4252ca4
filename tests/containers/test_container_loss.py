"""What trainers see of a container that dies: the same, whatever they did in it, and whoever killed it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from app.local.stack import StackPlan
from tangram import EnvironmentLost
from tests.gateway.conftest import Served
from tests.live.support import FAST_BEATS, Live, running
from tests.ports import free_port
from tests.workers_cpu.support import until

from .images import make_busybox
from .support import alone_as, containers

NODE = "cpu-0"
FILLING = "tangram-test-filling:1"
CAUSES = {"memory": "out_of_memory", "disk": "disk_limit"}


@pytest.fixture(scope="module")
def stack(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run a stack whose environments are containers of 64 MB, and whose `python3` fills the disk, whatever it is given."""
    folder = tmp_path_factory.mktemp("loss")
    (folder / "python3").write_text("#!/bin/sh\nwhile :; do cat /dev/zero >>big; done\n")
    (folder / "python3").chmod(0o755)
    make_busybox(FILLING, programs={"bin/python3": folder / "python3"})
    variables = {
        **FAST_BEATS,
        "TANGRAM_SANDBOX": "docker",
        "TANGRAM_IMAGE": FILLING,
        "TANGRAM_IMAGE_PULL": "never",
        "TANGRAM_CONTAINER_DISK_MB": "32",
        "TANGRAM_CONTAINER_MEMORY_MB": "64",
    }
    with alone_as(NODE):
        plan = StackPlan(nodes=1, cores=2, memory_mb=512, gateway_port=free_port(), variables=variables)
        with running(folder / "state", plan) as started:
            yield started


@pytest.mark.parametrize("killer", ["somebody", "the kernel"])
def test_every_action_of_a_container_that_dies_says_that_the_environment_is_lost(stack: Live, killer: str) -> None:
    with stack.client() as client:
        before = set(containers(NODE))
        env = client.open(trajectory="t", memory_mb=64)
        env.exec("touch here")
        # Given a command that runs, one that waits for it, and one that the scheduler has not handed out
        running_one = env.submit("touch begun; until test -f go; do sleep 0.05; done; tail /dev/zero & tail /dev/zero & wait; sleep 300")
        behind = env.submit("true")
        beside = env.submit("sleep 300", session="beside")
        assert until(lambda: "begun" in env.exec("ls", session="look").stdout)
        # When the container dies
        if killer == "somebody":
            (killed,) = set(containers(NODE)) - before
            subprocess.run(["docker", "kill", killed], check=True, capture_output=True)
        else:
            # It may be lost, too, before its end is known.
            env.submit("echo 1000 >/proc/1/oom_score_adj; touch go", session="look")
        # Then each says so, names the node, and says whose fault that was
        for handle in (running_one, behind, beside):
            with pytest.raises(EnvironmentLost, match=f"environment {env.id} is lost: ") as lost:
                handle.result(60)
            assert lost.value.node == NODE
            assert lost.value.fault == ("infrastructure" if killer == "somebody" else "program"), (lost.value.cause, lost.value.reason)
        # And so does whatever comes later
        for use in (lambda: env.exec("true"), lambda: env.read_file("here"), lambda: env.write_file("here", b"")):
            with pytest.raises(EnvironmentLost) as lost:
                use()
            assert lost.value.node == NODE


def what_stands() -> str:
    """Return what the engine says of the node's containers, what they use, and which processes they have."""
    asked = (["inspect", "--format", "{{.Id}} {{json .State}}"], ["stats", "--no-stream"], ["top"])
    told = [subprocess.run(["docker", *words, each], capture_output=True, text=True) for each in containers(NODE) for words in asked]
    return "\n".join(each.stdout + each.stderr for each in told)


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_what_its_own_background_does_to_a_container_is_the_programs_fault(stack: Live, how: str) -> None:
    # What is left has half a per cent of a core, so most of the memory is full before. No file may be larger than 32 MB.
    most = "head -c 28000000 /dev/zero >/dev/shm/most; head -c 24000000 /dev/zero >/dev/shm/more; "
    first = {"memory": f"{most}echo 1000 >/proc/1/oom_score_adj; ", "disk": ""}
    fills = {"memory": "while :; do tail /dev/zero; done", "disk": "while :; do cat /dev/zero >>big; done"}
    with stack.client() as client:
        # The engine may still be removing the container of the test before.
        before = set(containers(NODE))
        # Given an environment in which nothing runs but what a command has left
        env = client.open(trajectory="t", memory_mb=64)
        done = env.exec(f"{first[how]}(until test -f go; do sleep 0.05; done; {fills[how]}) >/dev/null 2>&1 &")
        assert (done.exit_code, done.stderr) == (0, "")
        env.write_file("go", b"")
        # When that fills the memory or the disk, and the container ends for it: late on a busy machine, since it only gets idle time
        assert until(lambda: before.issuperset(containers(NODE)), 200.0), what_stands()
        # Then whatever comes says that the program did it, before the scheduler knows and afterwards
        lost = "SELECT id FROM environments WHERE id = '" + env.id + "' AND state = 'lost' AND cause = '" + CAUSES[how] + "'"
        is_known = False
        while not is_known:
            is_known = bool(stack.rows(lost))
            for use in (lambda: env.exec("true"), lambda: env.read_file("here"), lambda: env.write_file("here", b"")):
                with pytest.raises(EnvironmentLost) as raised:
                    use()
                assert (raised.value.cause, raised.value.fault, raised.value.node) == (CAUSES[how], "program", NODE), str(raised.value)


@pytest.mark.parametrize(
    ("path", "body", "ran"),
    [("/run_code", {"language": "python", "code": "1"}, "run_result"), ("/run_jupyter", {"cells": ["1"]}, "driver")],
    ids=["code", "notebook"],
)
def test_code_that_fills_the_disk_has_failed(stack: Live, path: str, body: dict[str, object], ran: str) -> None:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    with Served(stack, stack.plan.gateway_url).http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    done = answer.json()
    assert (done["status"], done[ran]["status"], "disk" in done["message"]) == ("Failed", "Error", True)
