"""Images are fetched from a registry when they are needed, once, and those that were fetched are dropped again for room."""

from __future__ import annotations

import base64
import json
import logging
import re
import socket
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers_cpu.support import printed, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker import images
from workers.cpu.docker.engine import DockerEngine, split_reference
from workers.cpu.docker.options import ContainerOptions, PullPolicy
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import ImageMissing

from .conftest import node_name
from .registry import Registry
from .support import box_of, docker, engine

MIB = 1 << 20


def has(reference: str) -> bool:
    return bool(engine().images(reference))


Fetching = Callable[..., AbstractContextManager[ContainerSandbox]]


@pytest.fixture
def fetching(tmp_path: Path, options: ContainerOptions) -> Fetching:

    def make(pull: PullPolicy = "missing", cache_mb: int | None = None, stall_s: float = 60.0) -> AbstractContextManager[ContainerSandbox]:
        asked = replace(options, pull=pull, pull_s=60.0, image_cache_mb=cache_mb)
        return box_of(tmp_path / "box", asked, engine=DockerEngine(stall_s=stall_s))

    return make


def refused(box: ContainerSandbox, reference: str) -> str:
    """Return in which line an image is refused."""
    with pytest.raises(ImageMissing) as caught:
        mark(box, reference)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mark(box: ContainerSandbox, reference: str, name: str = "e1") -> str:
    """Open an environment of an image and return what is written in it."""
    return printed(box.open(EnvironmentSpec(id=name, image=reference)), "cat /mark")


def visit(box: ContainerSandbox, reference: str) -> None:
    box.open(EnvironmentSpec(id="visit", image=reference)).close()


def log_in(folder: Path, address: str, user: str, password: str) -> None:
    known = {address: {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}}
    (folder / "config.json").write_text(json.dumps({"auths": known}))


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("python", ("python", "latest")),
        ("python:3.12", ("python", "3.12")),
        ("library/python:3.12", ("library/python", "3.12")),
        ("127.0.0.1:5001/a/b", ("127.0.0.1:5001/a/b", "latest")),
        ("127.0.0.1:5001/a/b:1", ("127.0.0.1:5001/a/b", "1")),
        ("127.0.0.1:5001/a/b@sha256:0a", ("127.0.0.1:5001/a/b", "sha256:0a")),
        ("127.0.0.1:5001/a/b:1@sha256:0a", ("127.0.0.1:5001/a/b", "sha256:0a")),
        ("a@sha256:0a", ("a", "sha256:0a")),
    ],
)
def test_a_reference_is_a_name_and_a_tag_or_digest(reference: str, parts: tuple[str, str]) -> None:
    assert split_reference(reference) == parts


def test_an_image_is_fetched_when_it_is_missing_and_then_no_more(fetching: Fetching, registry: Registry) -> None:
    wanted = registry.add("a/b", "1", mark="first")
    registry.add("a/b", "1", mark="from afar")
    reference = f"{registry.address}/a/b:1"
    with fetching() as box:
        assert mark(box, reference) == "from afar"
        assert mark(box, reference, "e2") == "from afar"
    assert registry.asked["a/b"] == 1
    with fetching() as box:
        visit(box, reference)
        assert registry.asked["a/b"] == 1
        # When somebody removes it behind the worker's back; then it is fetched again
        assert until(lambda: subprocess.run(["docker", "rmi", reference], capture_output=True).returncode == 0)
        assert mark(box, reference) == "from afar"
        assert registry.asked["a/b"] == 2
        # And one may be named by its digest
        assert mark(box, f"{reference}@{wanted}", "e3") == "first"


def test_nothing_is_fetched_where_that_is_not_wanted(fetching: Fetching, registry: Registry) -> None:
    registry.add("a/b")
    with fetching("never") as box:
        said = refused(box, f"{registry.address}/a/b")
        assert said == f"image '{registry.address}/a/b' is not on this node, and nothing is fetched here"
    assert registry.asked["a/b"] == 0


def test_an_image_is_asked_for_again_by_each_worker_where_that_is_wanted(fetching: Fetching, registry: Registry) -> None:
    # Given a worker that has fetched an image, whose tag moves on meanwhile
    registry.add("a/b", mark="first")
    reference = f"{registry.address}/a/b"
    with fetching("always") as box:
        assert mark(box, reference) == "first"
        registry.add("a/b", mark="second")
        assert mark(box, reference, "e2") == "first"
    with fetching("always") as box:
        assert mark(box, reference) == "second"
    with fetching("missing") as box:
        registry.add("a/b", mark="third")
        assert mark(box, reference) == "second"


def test_a_slow_fetch_tells_how_far_it_is(
    fetching: Fetching, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry.add("a/b")
    registry.pause_s = 0.05
    reference = f"{registry.address}/a/b"
    monkeypatch.setattr(images, "REPORT_S", 0.3)
    with caplog.at_level(logging.INFO, logger=images.__name__), fetching() as box:
        mark(box, reference)
    said = [record.getMessage() for record in caplog.records if record.name == images.__name__]
    assert said[0] == f"fetching image {reference}"
    assert said[-1].startswith(f"image {reference} is here after ")
    done = [int(line.split()[3]) for line in said[1:-1]]
    assert len(done) >= 2
    assert all(line.startswith(f"fetching image {reference}: ") and line.endswith(" MB") for line in said[1:-1])
    assert done == sorted(done)


def test_a_registry_that_falls_silent_fails_the_environment_only(fetching: Fetching, registry: Registry) -> None:
    registry.add("a/b", ballast=MIB)
    registry.stalls = True
    reference = f"{registry.address}/a/b"
    with fetching(stall_s=2.0) as box, pytest.raises(ImageMissing, match="nothing more of it came for 2 s$"):
        mark(box, reference)
    registry.stalls = False
    registry.stalled.set()
    with fetching() as box:
        assert mark(box, reference) == "1"


def test_what_cannot_be_had_is_refused_in_one_line(fetching: Fetching, registry: Registry) -> None:
    registry.add("a/b", "1")
    with socket.socket() as bound, fetching() as box:
        bound.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{bound.getsockname()[1]}"
        for reference, words in (
            (f"{registry.address}/a/b:2", "manifest"),
            (f"{registry.address}/a/c", "manifest"),
            (f"{nobody}/a/b", "connection refused"),
        ):
            assert re.match(f"image '{reference}' cannot be had: .*{words}", refused(box, reference))


def test_without_the_right_credentials_an_image_is_refused_in_one_line(tmp_path: Path, fetching: Fetching, registry: Registry) -> None:
    registry.add("a/b")
    registry.login = ("reader", "secret")
    with fetching() as box:
        for password in (None, "wrong"):
            if password is not None:
                log_in(tmp_path, registry.address, "reader", password)
            said = refused(box, f"{registry.address}/a/b")
            assert said.startswith(f"image '{registry.address}/a/b' cannot be had: ")
            assert "unauthorized" in said or "no basic auth credentials" in said
            assert "wrong" not in said
        # When somebody writes the right one; then the image is had, without another start
        log_in(tmp_path, registry.address, "reader", "secret")
        assert mark(box, f"{registry.address}/a/b") == "1"


def test_fetched_images_are_dropped_for_room_the_longest_unused_first(fetching: Fetching, registry: Registry) -> None:
    # Given room for two images, of which two were fetched, the older one used again last
    one, two, three = references = [f"{registry.address}/a/{name}:latest" for name in ("one", "two", "three")]
    for name in ("one", "two", "three"):
        registry.add(f"a/{name}", mark=name, ballast=8 * MIB)
    with fetching(cache_mb=25) as box:
        for reference in (one, two, one):
            visit(box, reference)
        assert has(one)
        assert has(two)
        visit(box, three)
        assert until(lambda: [has(reference) for reference in references] == [True, False, True])
        assert mark(box, two) == "two"


def test_images_that_are_in_use_or_are_others_too_are_never_dropped(fetching: Fetching, registry: Registry) -> None:
    # Given no room at all, and an image that somebody else has fetched
    for name in ("mine", "theirs", "used", "made"):
        registry.add(f"a/{name}", mark=name, ballast=2 * MIB)
    mine, theirs, used, made = (f"{registry.address}/a/{name}:latest" for name in ("mine", "theirs", "used", "made"))
    docker("pull", "-q", theirs)
    with fetching(cache_mb=1) as box:
        # And one of which an environment runs, and one of which somebody has made a container that does not run
        assert mark(box, used) == "used"
        env = box.open(EnvironmentSpec(id="e2", image=made))
        container = docker("create", made, "true")
        try:
            env.close()
            # When the first is used, and one that nobody else needs; then only the latter goes
            for reference in (theirs, mine):
                visit(box, reference)
            assert until(lambda: not has(mine))
            assert all(map(has, (theirs, used, made)))
        finally:
            docker("rm", container)


def test_snapshots_go_with_their_sandbox_whatever_its_node_is_called(tmp_path: Path, options: ContainerOptions) -> None:
    with box_of(tmp_path / "box", options, f'{node_name()}\'s "rack" $HOME') as box:
        box.open(EnvironmentSpec(id="e1"))
        snapshot = box.snapshot("e1")
        assert has(snapshot)
    assert not has(snapshot)
