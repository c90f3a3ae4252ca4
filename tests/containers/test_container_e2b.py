"""E2B's client, unchanged, where sandboxes are containers: images by template, paths and networks of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from app.local.stack import StackPlan
from tests.gateway.conftest import Served, options_of
from tests.live.support import running
from tests.ports import free_port

from .images import make_with_shell
from .support import alone_as, containers

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

BASH = "tangram-test-bash:1"


@pytest.fixture(scope="module")
def served(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    make_with_shell("bash", BASH)
    variables = {"TANGRAM_SANDBOX": "docker", "TANGRAM_IMAGE": BASH, "TANGRAM_IMAGE_PULL": "never"}
    with alone_as("cpu-0"):
        plan = StackPlan(nodes=1, cores=2, memory_mb=1024, api_nodes=0, gateway_port=free_port(), variables=variables)
        with running(tmp_path_factory.mktemp("e2b"), plan) as live:
            yield Served(live, plan.gateway_url)


@pytest.fixture(scope="module")
def options(served: Served) -> dict[str, str]:
    return options_of(served, "e2b")


@pytest.fixture(scope="module")
def sandbox(options: dict[str, str]) -> Iterator[e2b.Sandbox]:
    opened = e2b.Sandbox.create(BASH, **options)
    yield opened
    opened.kill()


def test_paths_are_those_of_the_container(sandbox: e2b.Sandbox) -> None:
    files = sandbox.files
    files.write("/tmp/deep/file", "text")
    assert files.read("/tmp/deep/file") == sandbox.commands.run("cat /tmp/deep/file").stdout == "text"
    assert sandbox.commands.run("pwd; id -u").stdout == "/work\n1000\n"
    sandbox.commands.run("ln -s file /tmp/deep/link")
    listed = [(entry.path, entry.type.value) for entry in files.list("/tmp/deep")]
    assert listed == [("/tmp/deep/file", "file"), ("/tmp/deep/link", "symlink")]
    assert files.rename("/tmp/deep/file", "/tmp/moved/file").path == "/tmp/moved/file"
    assert (files.get_info("/tmp/moved/file").size, files.exists("/tmp/deep/file")) == (4, False)
    files.remove("/tmp/moved")
    assert not files.make_dir("/tmp") and not files.exists("/tmp/moved")


def test_names_that_are_neither_template_nor_image_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(e2b.SandboxException, match="404: template 'nothing' was not found"):
        e2b.Sandbox.create("nothing", **options)
    with pytest.raises(e2b.SandboxException, match="no/such:image"):
        e2b.Sandbox.create("no/such:image", **options)
    keys = {name: options[name] for name in ("api_key", "api_url")}
    e2b.Template.build(e2b.Template().from_image(BASH), "something", **keys)
    sandbox = e2b.Sandbox.create("something", **options)
    assert sandbox.commands.run("echo $BASH").stdout == "/bin/bash\n"
    sandbox.kill()


def test_a_container_that_dies_is_a_sandbox_that_is_gone(served: Served, options: dict[str, str], sandbox: e2b.Sandbox) -> None:
    before = set(containers("cpu-0"))
    dying = e2b.Sandbox.create(BASH, **options)
    running = dying.commands.run("sleep 60", background=True)
    (container,) = set(containers("cpu-0")) - before
    subprocess.run(["docker", "kill", container], check=True, capture_output=True)
    with pytest.raises(e2b.exceptions.SandboxNotRunningException):
        running.wait()
    with pytest.raises(e2b.exceptions.SandboxNotRunningException):
        dying.files.read("x")
    served.live.until(lambda: not dying.is_running())
    assert not dying.kill()
