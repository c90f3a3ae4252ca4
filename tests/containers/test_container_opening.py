"""An open that is cancelled or out of time ends, in whatever it is doing, and leaves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.errors import ActionCancelled, ActionTimedOut
from tests.workers_cpu.support import printed, until
from workers.cpu import opening as openings
from workers.cpu.abstract import Environment, EnvironmentSpec
from workers.cpu.docker.engine import ContainerSpec, DockerEngine
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EnvironmentGone, ImageMissing, StartTimeout
from workers.cpu.opening import Opening

from . import support
from .conftest import node_name
from .registry import Registry
from .support import containers, sandbox_threads

pytestmark = pytest.mark.real

SLOW = 1.0
"""Seconds after which the registry sends the next piece of an image; it has 40 pieces."""


class SlowEngine(DockerEngine):
    """An engine that makes no container until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()

    def create(self, spec: ContainerSpec) -> str:
        self.asked.set()
        self.answers.wait()
        return super().create(spec)


@pytest.fixture
def registry(registry: Registry, tmp_path: Path) -> Registry:
    """Give a registry with one image, a/b. The engine keeps layers that it had once, so each test has one of its own."""
    registry.add("a/b", mark=str(tmp_path))
    return registry


Opens = Callable[..., tuple[Opening, Future[Environment]]]


@contextmanager
def box_of(base: Path, options: ContainerOptions, engine: DockerEngine | None = None) -> Iterator[tuple[ContainerSandbox, Opens]]:
    """Give a sandbox, and what opens environments of it in threads of their own."""
    before = threading.enumerate()
    with support.box_of(base, replace(options, pull="missing"), node_name(), engine) as box, ThreadPoolExecutor() as threads:

        def opens(name: str, image: str | None = None, timeout_s: float | None = None) -> tuple[Opening, Future[Environment]]:
            opening, spec = Opening(timeout_s), EnvironmentSpec(id=name, image=image)
            return opening, threads.submit(opening.run, lambda: box.open(spec, opening), Environment.close)

        yield box, opens
    assert until(lambda: sandbox_threads(*before) == []), sandbox_threads(*before)


def is_clear(base: Path) -> bool:
    """Say whether nothing of an environment is left: no container, no folder, no pull."""
    return (
        containers(node_name()) == []
        and list((base / "control").iterdir()) == []
        and not {"tangram-open", "tangram-pull"} & {*sandbox_threads()}
    )


@pytest.fixture(params=["pulling", "asking for an image", "waiting for a turn", "starting"])
def stuck(request: pytest.FixtureRequest, options: ContainerOptions, registry: Registry, hangs: str) -> tuple[str, ContainerOptions, str]:
    """Give an open that comes no further than a phase: its image, the options, and words of its reason."""
    if request.param == "pulling":
        registry.pause_s = SLOW
        return f"{registry.address}/a/b", options, "fetching image"
    if request.param == "asking for an image":
        registry.is_silent = True
        return f"{registry.address}/a/b", options, "fetching image"
    if request.param == "starting":
        return hangs, options, "starting a container"
    return hangs, replace(options, starting_limit=1), "waiting for its turn"


def test_a_cancel_ends_an_open(tmp_path: Path, stuck: tuple[str, ContainerOptions, str], registry: Registry) -> None:
    # Given an open that is stuck in some phase; the turn that it waits for is taken by another
    image, options, words = stuck
    with box_of(tmp_path / "box", options) as (box, opens):
        other = opens("other", image)[0] if words.startswith("waiting") else None
        assert other is None or until(lambda: other.phase.startswith("starting"))
        opening, opened = opens("e1", image)
        assert until(lambda: opening.phase.startswith(words))
        opening.cancel("enough")
        with pytest.raises(ActionCancelled, match="^enough$"):
            opened.result(60)
        if other is not None:
            other.cancel("over")
        # And nothing is left, the engine takes no more of an image, and the same environment can be opened
        assert until(lambda: is_clear(tmp_path / "box"))
        assert not registry.asked["a/b"] or until(lambda: registry.broken_off == 1)
        assert printed(box.open(EnvironmentSpec(id="e1")), "echo up") == "up\n"


def test_a_container_that_does_not_come_up_in_time_is_given_up(tmp_path: Path, options: ContainerOptions, hangs: str) -> None:
    with box_of(tmp_path / "box", replace(options, start_timeout_s=2.0)) as (box, _):
        with pytest.raises(StartTimeout):
            box.open(EnvironmentSpec(id="e1", image=hangs))
        assert box.environments() == () and until(lambda: is_clear(tmp_path / "box"))


def test_an_open_out_of_time_ends_and_says_in_what(tmp_path: Path, options: ContainerOptions, hangs: str) -> None:
    with box_of(tmp_path / "box", options) as (_, opens):
        with pytest.raises(ActionTimedOut, match="^the environment was not open after 2 s: it was starting a container"):
            opens("e1", hangs, 2.0)[1].result(60)
        assert until(lambda: is_clear(tmp_path / "box"))


def test_what_a_slow_engine_makes_after_the_end_of_an_open_is_removed(
    tmp_path: Path, options: ContainerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an engine that does not answer
    monkeypatch.setattr(openings, "TAKE_BACK_S", 0.2)
    engine = SlowEngine()
    with box_of(tmp_path / "box", options, engine) as (box, opens):
        opening, opened = opens("e1")
        assert engine.asked.wait(60)
        opening.cancel("enough")
        with pytest.raises(ActionCancelled):
            opened.result(60)
        engine.answers.set()
        assert until(lambda: is_clear(tmp_path / "box"))
        with pytest.raises(EnvironmentGone):
            box.get("e1")


def test_a_cancel_leaves_the_pull_to_others_that_wait_for_it(tmp_path: Path, options: ContainerOptions, registry: Registry) -> None:
    registry.pause_s = SLOW
    image = f"{registry.address}/a/b"
    with box_of(tmp_path / "box", options) as (_, opens):
        (first, one), (second, two) = opens("e1", image), opens("e2", image)
        assert until(lambda: registry.asked["a/b"] == 1 and all(each.phase.startswith("fetching") for each in (first, second)))
        first.cancel("enough")
        with pytest.raises(ActionCancelled):
            one.result(60)
        registry.pause_s = 0.0
        assert printed(two.result(60), "cat /mark") == str(tmp_path)
    assert (registry.asked["a/b"], registry.broken_off) == (1, 0)


def test_a_pull_has_one_deadline_in_all(tmp_path: Path, options: ContainerOptions, registry: Registry) -> None:
    # Given a registry that sends a piece every second, 40 in all, and an image that may take 4 seconds
    registry.pause_s = SLOW
    with box_of(tmp_path / "box", replace(options, pull_s=4.0)) as (_, opens):
        first = opens("e1", f"{registry.address}/a/b")[1]
        assert until(lambda: registry.asked["a/b"] == 1)
        # When another open comes to wait for it; then both fail when the 4 seconds are over
        second = opens("e2", f"{registry.address}/a/b")[1]
        for opened in (first, second):
            with pytest.raises(ImageMissing, match="cannot be had: it was not here after 4 s$"):
                opened.result(60)
        assert until(lambda: registry.broken_off == 1)


def test_closing_the_sandbox_ends_every_open(tmp_path: Path, options: ContainerOptions, hangs: str) -> None:
    with box_of(tmp_path / "box", replace(options, starting_limit=1)) as (box, opens):
        both = [opens("e1", hangs)]
        assert until(lambda: both[0][0].phase.startswith("starting"))
        both.append(opens("e2", hangs))
        assert until(lambda: both[1][0].phase.startswith("waiting for its turn"))
        box.close()
        for _, opened in both:
            with pytest.raises(EnvironmentGone, match="the sandbox is closed"):
                opened.result(60)
    assert containers(node_name()) == []
