"""Evicting and restoring real models: what is freed, and what comes back."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from app.services_file import ServiceConfig, load_services_file
from workers.gpu.devices import MIB, Device
from workers.gpu.engines.torch_hf import TorchEngine
from workers.gpu.errors import EngineFailed, NotResident
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="files are found in /proc, and limited for a full disk")
CELL = [Device("cpu:0", "cpu", 1000, "cpu")]
SEQUENCES = [[5, 17, 33], list(range(100, 180)), [9, 9]]
ITEMS = [{"prompt": "What is 2 + 3?", "response": "5"}, {"prompt": "p", "response": "a longer response than the other"}]


def teacher(models: Path, state: Path) -> TorchEngine:
    return TorchEngine("teacher-0", "logprobs", models / "teacher-0", state)


def open_below(folder: Path) -> int:
    """Return how many files this process has open that are or were in a folder."""
    links = [Path(os.readlink(link)) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.is_relative_to(folder) for link in links)


def test_answers_are_bitwise_the_same_after_every_restore(models: Path, tmp_path: Path) -> None:
    engine = teacher(models, tmp_path)
    engine.start(CELL)
    before = engine.logprobs(SEQUENCES)

    for _ in range(3):
        engine.evict()
        assert (engine.state, engine.memory_mb()) == ("host", 0.0)
        engine.restore(CELL)
        assert engine.logprobs(SEQUENCES) == before


def test_a_service_comes_back_on_more_cells_and_on_fewer(models: Path, tmp_path: Path) -> None:
    engine = teacher(models, tmp_path)
    engine.start(CELL)
    (before,), one = engine.logprobs([SEQUENCES[1]]), engine.memory_mb()

    for cells in (3, 2, 1):
        engine.evict()
        engine.restore(CELL * cells)
        assert engine.memory_mb() == pytest.approx(cells * one)
        assert engine.logprobs([SEQUENCES[1]] * 3) == [pytest.approx(before, abs=1e-5)] * 3


def test_nothing_is_left_in_the_state_folder_by_eviction_or_stop(models: Path, tmp_path: Path) -> None:
    engine = teacher(models, tmp_path / "state")
    engine.start(CELL)
    engine.evict()
    while_evicted = list((tmp_path / "state").iterdir())
    engine.stop()

    assert while_evicted == []
    assert (engine.state, engine.memory_mb()) == ("absent", 0.0)
    engine.start(CELL)
    assert len(engine.logprobs(SEQUENCES)) == len(SEQUENCES)


def test_where_no_host_copy_can_be_written_eviction_fails_and_still_frees(models: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    engine = teacher(models, tmp_path / "state")
    engine.start(CELL)

    with pytest.raises(EngineFailed, match="evicting failed: FileExistsError"):
        engine.evict()

    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)


@on_linux
def test_a_disk_that_fills_up_half_way_costs_the_copy_and_nothing_else(models: Path, tmp_path: Path) -> None:
    import resource

    engine = teacher(models, tmp_path)
    engine.start(CELL)
    before = engine.logprobs(SEQUENCES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        with pytest.raises(EngineFailed, match="evicting failed: OSError"):
            engine.evict()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (engine.state, engine.memory_mb()) == ("failed", 0.0) and open_below(tmp_path) == 0
    engine.start(CELL)
    assert engine.logprobs(SEQUENCES) == before


@on_linux
def test_fifty_evictions_and_restores_leave_no_file_and_no_thread(models: Path, tmp_path: Path) -> None:
    engine = teacher(models, tmp_path)
    engine.start(CELL)
    engine.evict()
    files, threads = open_below(tmp_path), set(threading.enumerate())
    for round_ in range(50):
        engine.restore(CELL * (1 + round_ % 2))
        engine.evict()
    assert open_below(tmp_path) == files > 0 and set(threading.enumerate()) <= threads
    engine.stop()
    assert open_below(tmp_path) == 0


def test_weights_that_something_holds_on_to_are_seen(models: Path, tmp_path: Path) -> None:
    engine = teacher(models, tmp_path)
    engine.start(CELL)
    held = engine._replicas[0].block

    engine.evict()

    assert engine.memory_mb() == held.numel() / MIB > 0.0
    del held
    assert engine.memory_mb() == 0.0


def test_a_host_swaps_real_models_on_one_cell(models: Path, tmp_path: Path) -> None:
    services = load_services_file(models / "services.toml").services
    host = ServiceHost([Device("cpu:0", "cpu", 250, "cpu")], services, tmp_path)
    host.ensure_resident("rm-small", (0,))
    scores = host.run("rm-small", (0,), lambda engine: engine.score(ITEMS))

    host.ensure_resident("teacher-0", (0,), evict=[InstanceName("rm-small", (0,))])
    with pytest.raises(NotResident):
        host.run("rm-small", (0,), lambda engine: engine.score(ITEMS))
    logprobs = host.run("teacher-0", (0,), lambda engine: engine.logprobs(SEQUENCES))
    host.ensure_resident("rm-small", (0,), evict=[InstanceName("teacher-0", (0,))])

    assert host.run("rm-small", (0,), lambda engine: engine.score(ITEMS)) == scores
    assert [len(values) for values in logprobs] == [2, 79, 1]
    host.close()
    assert all(entry.state == "absent" for entry in host.status())


def test_a_model_that_needs_more_than_declared_is_booked_with_that_and_says_what_to_declare(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    declared = load_services_file(models / "services.toml").services["rm-small"].model_copy(update={"memory_mb": 0.1})
    host = ServiceHost(CELL, {"rm-small": declared}, tmp_path)

    host.ensure_resident("rm-small", (0,))

    assert host.held_mb(0) == pytest.approx(host.status()[0].memory_mb) and host.held_mb(0) > 0.3
    assert "rm-small on cell 0 holds 0 MiB of a cell and declares 0.1: declare services.rm-small.memory_mb = 1" in caplog.text
    # And the scheduler hears what it needs
    assert host.needed_mb("rm-small", declared) > 0.3


def test_a_model_that_would_overrun_its_cell_is_refused_when_it_is_loaded(models: Path, tmp_path: Path) -> None:
    declared = load_services_file(models / "services.toml").services["rm-small"].model_copy(update={"memory_mb": 0.1})
    neighbour = ServiceConfig.model_validate({"engine": "stub", "task": "score", "memory_mb": CELL[0].memory_mb - 0.2})
    host = ServiceHost(CELL, {"rm-small": declared, "neighbour": neighbour}, tmp_path)
    host.ensure_resident("neighbour", (0,))

    with pytest.raises(
        EngineFailed, match=r"its weights alone take 0\.4 MiB of each cell, and there is room for 0\.2: declare more memory_mb"
    ):
        host.ensure_resident("rm-small", (0,))

    (entry,) = (one for one in host.status() if one.name.service == "rm-small")
    assert (entry.state, entry.reserved, entry.memory_mb) == ("failed", False, 0.0)


def test_swapping_under_load_gives_right_answers_or_none(models: Path, tmp_path: Path) -> None:
    services = load_services_file(models / "services.toml").services
    host = ServiceHost([Device("cpu:0", "cpu", 250, "cpu")], services, tmp_path)
    host.ensure_resident("teacher-0", (0,))
    expected = host.run("teacher-0", (0,), lambda engine: engine.logprobs(SEQUENCES))

    def ask(_: int) -> list[list[float]] | None:
        try:
            return host.run("teacher-0", (0,), lambda engine: engine.logprobs(SEQUENCES))
        except NotResident:
            return None

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, index) for index in range(200)]
        for _ in range(10):
            host.ensure_resident("rm-small", (0,), evict=[InstanceName("teacher-0", (0,))])
            host.ensure_resident("teacher-0", (0,), evict=[InstanceName("rm-small", (0,))])
        answers = [call.result(timeout=120) for call in asked]

    # Calls that were computed together may differ in their last bits; one by itself does not.
    close = [pytest.approx(row, abs=1e-5) for row in expected]
    assert all(answer == close for answer in answers if answer is not None)
    assert ask(0) == expected
