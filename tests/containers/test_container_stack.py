"""A whole stack whose sandboxes are containers: paths, images by template, and what its callers see of a container that dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tangram import EnvironmentLost
from tests.gateway.conftest import Served, options_of, serving
from tests.workers_cpu.support import until

from .images import make_with_shell
from .support import alone_as, containers, docker

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

pytestmark = pytest.mark.real

NODE, FILLING = "cpu-0", "tangram-test-filling:1"


@pytest.fixture(scope="module")
def served(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run a stack with a gateway, whose environments have bash, and a `python3` that fills the disk, whatever it is given."""
    folder = tmp_path_factory.mktemp("stack")
    (folder / "python3").write_text("#!/bin/sh\nwhile :; do cat /dev/zero >>big; done\n")
    (folder / "python3").chmod(0o755)
    make_with_shell("bash", FILLING, {"bin/python3": folder / "python3"})
    variables = {
        "TANGRAM_SANDBOX": "docker",
        "TANGRAM_IMAGE": FILLING,
        "TANGRAM_IMAGE_PULL": "never",
        "TANGRAM_CONTAINER_DISK_MB": "32",
        "TANGRAM_CONTAINER_MEMORY_MB": "64",
    }
    with alone_as(NODE), serving(folder, memory_mb=512, variables=variables) as served:
        yield served


@pytest.fixture(scope="module")
def options(served: Served) -> dict[str, str]:
    return options_of(served, "e2b")


def test_names_that_are_neither_template_nor_image_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(e2b.SandboxException, match="404: template 'nothing' was not found"):
        e2b.Sandbox.create("nothing", **options)
    with pytest.raises(e2b.SandboxException, match="no/such:image"):
        e2b.Sandbox.create("no/such:image", **options)
    keys = {name: options[name] for name in ("api_key", "api_url")}
    e2b.Template.build(e2b.Template().from_image(FILLING), "something", **keys)
    sandbox = e2b.Sandbox.create("something", **options)
    assert sandbox.commands.run("echo $BASH").stdout == "/bin/bash\n"
    sandbox.kill()


def test_every_action_of_a_container_that_dies_says_that_the_environment_is_lost(served: Served) -> None:
    with served.live.client() as client:
        before = set(containers(NODE))
        env = client.open(trajectory="t")
        # Given a command that runs, one that waits for it, and one that the scheduler has not handed out
        handles = [env.submit("touch begun; sleep 300"), env.submit("true"), env.submit("sleep 300", session="beside")]
        assert until(lambda: "begun" in env.exec("ls", session="look").stdout)
        docker("kill", *set(containers(NODE)) - before)
        later = (lambda: env.exec("true"), lambda: env.read_file("here"), lambda: env.write_file("here", b""))
        for use in (*(lambda handle=handle: handle.result(60) for handle in handles), *later):
            with pytest.raises(EnvironmentLost, match=f"environment {env.id} is lost: ") as lost:
                use()
            assert (lost.value.node, lost.value.fault) == (NODE, "infrastructure")


@pytest.mark.parametrize(
    ("path", "body", "ran"),
    [("/run_code", {"language": "python", "code": "1"}, "run_result"), ("/run_jupyter", {"cells": ["1"]}, "driver")],
    ids=["code", "notebook"],
)
def test_code_that_fills_the_disk_has_failed(served: Served, path: str, body: dict[str, object], ran: str) -> None:
    with served.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    done = answer.json()
    assert (done["status"], done[ran]["status"], "disk" in done["message"]) == ("Failed", "Error", True)
