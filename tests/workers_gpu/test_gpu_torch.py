"""What only the torch engine has: batches of its own, models read in this process, copies in files, devices of several models."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.fixtures import changed
from tests.engines.kinds import Shelf, Torch
from tests.engines.waiting import until
from tests.lazily import Lazily, needs
from workers.gpu.devices import MIB, Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.errors import BadInput, CallFailed, EngineFailed, WrongAnswer
from workers.gpu.items import Reading, TokenLogprobs

if TYPE_CHECKING:
    from workers.gpu.engines.torch_hf import TorchEngine

pytestmark = needs("torch", "transformers")
torch, files, tokenizers = map(Lazily, ("torch", "safetensors.torch", "tokenizers"))
torch_hf, compute = map(Lazily, ("workers.gpu.engines.torch_hf", "workers.gpu.engines.compute"))

CLOSE = 1e-4
CELL = [Device("cpu:0", "cpu", 1000, "cpu")]
ITEMS = [{"prompt": "What is 2 + 3?", "response": "5"}, {"prompt": "p", "response": "a longer response than the other"}]
SEQUENCES = [[5, 17, 33], [6, 17, 33, 40, 41, 300, 511, 0, 0, 12], [9], [0, 0], list(range(100, 180))]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="files are found in /proc, and limited for a full disk")


@pytest.fixture
def teacher(shelf: Shelf) -> Engine:
    return shelf.engine("torch", "logprobs")


@pytest.fixture
def own(models: Path, tmp_path: Path) -> TorchEngine:
    """Return an absent teacher that no other test has."""
    return torch_hf.TorchEngine("teacher-0", "logprobs", models / "teacher-0", tmp_path / "state")


@pytest.fixture
def torch_kind(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> Torch:
    return Torch(models, tmp_path, monkeypatch, shelf)


def must_be_close(found: list[TokenLogprobs], wanted: list[TokenLogprobs]) -> None:
    for said, expected in zip(found, wanted, strict=True):
        assert said.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)
        assert (said.ranks, said.top_logprobs) == (expected.ranks, pytest.approx(expected.top_logprobs, abs=CLOSE))


def test_small_batches_and_logits_in_parts_give_the_same_answers_in_order(teacher: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = teacher.ranked(SEQUENCES, 5)
    monkeypatch.setattr("workers.gpu.engines.torch_hf._BATCH_TOKENS", 8)
    monkeypatch.setattr("workers.gpu.engines.compute._LOGITS_AT_ONCE", 3 * 512)
    must_be_close(teacher.ranked(SEQUENCES, 5), whole)


def test_ids_that_are_as_likely_have_the_same_rank_and_a_small_vocabulary_is_given_whole() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, float("-inf")]])
    said = compute.read_logits(logits, torch.tensor([2, 3]), 9)
    assert said.ranks == [1, 4]
    assert sorted(said.top_ids[:2]) == [1, 2] and said.top_ids[2:4] == [3, 0]
    assert len(said.top_ids) == 8 and said.top_logprobs[7] == float("-inf")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_is_chosen_from_what_are_no_numbers(models: Path, tmp_path: Path, temperature: float) -> None:
    # Given weights that are no numbers for one word, which no question asks that is put to a model when it starts
    folder = Path(shutil.copytree(models / "teacher-0", tmp_path / "poisoned"))
    weights = files.load_file(folder / "model.safetensors")
    engine = torch_hf.TorchEngine("poisoned", "logprobs", folder, tmp_path / "state")
    (word,) = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Z").ids
    weights["model.embed_tokens.weight"][word] = math.nan
    files.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine.start(CELL)
    # When it is asked with that word, then that fails, and other questions do not
    with pytest.raises(CallFailed, match=r"^prompts\[0\]: the model's logits are not numbers$"):
        engine.generate(["Z"], 4, temperature)
    assert engine.generate(["What is"], 4)


def test_waiting_calls_are_one_batch_each_with_its_own_top_k_and_bad_input_harms_nobody(
    teacher: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the answers of calls that are made alone
    calls = [([[5, 17, 33], [4, 8]], 3), ([[6, 17, 33, 40, 41]], 0), ([[9, 300], list(range(50))], 7)]
    alone, alone_unranked = [teacher.ranked(*call) for call in calls], teacher.logprobs([[5, 17]])
    # And a call that holds the device
    began, gate, batches = threading.Event(), threading.Event(), list[list[int | None]]()
    real = compute.logprobs

    def slow(model: object, batch: list[Reading]) -> list[TokenLogprobs]:
        batches.append([reading.top_k for reading in batch])
        began.set()
        assert gate.wait(60)
        return real(model, batch)  # type: ignore[no-any-return]

    monkeypatch.setattr("workers.gpu.engines.compute.logprobs", slow)
    monkeypatch.setattr(teacher, "_limit", 6)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(teacher.logprobs, [[1, 2]])
        assert began.wait(60)
        # When others wait for it, one of them with an id that the model does not know
        asked, unranked = [pool.submit(teacher.ranked, *call) for call in calls], pool.submit(teacher.logprobs, [[5, 17]])
        with pytest.raises(BadInput, match=r"sequences\[0\]: token id 512"):
            teacher.logprobs([[3, 512]])
        until(lambda: len(teacher._sequences._calls) == 5)  # type: ignore[attr-defined]
        gate.set()
        # Then they are computed together, and each gets what it gets alone
        assert len(first.result(120)[0]) == 1
        for call, expected in zip(asked, alone, strict=True):
            must_be_close(call.result(120), expected)
        assert unranked.result(120) == [pytest.approx(row, abs=CLOSE) for row in alone_unranked]
    assert batches[0] == [None] and sorted(batches[1], key=str) == [0, 3, 3, 7, 7, None]


def test_a_model_larger_than_its_cell_is_refused_before_it_is_read(models: Path, tmp_path: Path) -> None:
    # Given a model of 0.4 MiB whose file is damaged after the header
    folder = Path(shutil.copytree(models / "rm-small", tmp_path / "rm"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    made = torch_hf.TorchEngine("rm", "score", folder, tmp_path)
    # Then a device that is too small for it is refused, with what to do
    with pytest.raises(EngineFailed, match=r'rm: .*its weights take 0\.4 MiB and cpu:0 has 0: they need engine = "vllm", which splits'):
        made.start([Device("cpu:0", "cpu", 0, "cpu")])
    # And with enough memory the file is read
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        made.start(CELL)


def test_weights_of_another_architecture_are_refused_though_none_are_missing(models: Path, tmp_path: Path) -> None:
    # Given a Qwen2, whose attention has biases, that says it is a Llama, whose attention has none
    folder = Path(shutil.copytree(models / "rm-small", tmp_path / "rm"))
    changed(folder, model_type="llama", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(EngineFailed, match=r"weights of another architecture than its config.json names: model.layers.0.self_attn"):
        torch_hf.TorchEngine("rm", "score", folder, tmp_path).start(CELL)


def test_half_precision_is_held_in_half_the_memory(models: Path, shelf: Shelf, tmp_path: Path) -> None:
    whole, half = shelf.engine("torch", "score"), torch_hf.TorchEngine("rm", "score", models / "rm-small", tmp_path, dtype="bfloat16")
    half.start(CELL)
    assert half.memory_mb() == pytest.approx(whole.memory_mb() / 2, rel=0.05)
    assert half.score(ITEMS) == pytest.approx(whole.score(ITEMS), abs=0.5)


def test_a_wrong_byte_on_one_of_several_devices_is_noticed(torch_kind: Torch, cells: list[Device]) -> None:
    engine = torch_kind.make()
    engine.start(cells)
    engine.evict()
    torch_kind.spoil(replica=1, part=0.75)
    with pytest.raises(WrongAnswer, match="rm: restoring failed: fixed question 0 is answered with .*; they may not differ"):
        engine.restore(cells)


def test_a_device_of_another_model_may_compute_other_bits(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an engine that was started on one device, and two devices, one of the same model, that compute other last bits
    first, alike, another = (Device(name, "cpu", 1000, "cpu") for name in ("cpu:0 (A)", "cpu:1 (A)", "cpu:2 (B)"))
    engine = torch_hf.TorchEngine("a", "score", models / "rm-small", tmp_path)
    engine.start([first])
    engine.evict()
    noise, real = [1e-6], compute.scores
    monkeypatch.setattr("workers.gpu.engines.compute.scores", lambda *asked: [value + noise[0] for value in real(*asked)])
    # Then the answers of the device of another model may be off by so little
    engine.restore([another])
    engine.evict()
    # But not those of the same model, nor by more
    with pytest.raises(WrongAnswer, match="they may not differ"):
        engine.restore([alike])
    noise[0] = 0.0
    engine.start([first])
    engine.evict()
    noise[0] = 0.1
    with pytest.raises(WrongAnswer, match="they may differ by 0.0001"):
        engine.restore([another])


def open_below(folder: Path) -> int:
    """Return how many files this process has open that are or were in a folder."""
    links = [Path(os.readlink(link)) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.is_relative_to(folder) for link in links)


@on_linux
def test_a_disk_that_fills_up_half_way_costs_the_copy_and_nothing_else(own: TorchEngine, tmp_path: Path) -> None:
    import resource

    own.start(CELL)
    before = own.logprobs(SEQUENCES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    try:
        with pytest.raises(EngineFailed, match="evicting failed: OSError"):
            own.evict()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (own.state, own.memory_mb()) == ("failed", 0.0) and open_below(tmp_path) == 0
    own.start(CELL)
    assert own.logprobs(SEQUENCES) == before


@on_linux
def test_evictions_and_restores_leave_no_file_and_no_thread(own: TorchEngine, tmp_path: Path) -> None:
    own.start(CELL)
    own.evict()
    files, threads = open_below(tmp_path), set(threading.enumerate())
    for round_ in range(10):
        own.restore(CELL * (1 + round_ % 2))
        own.evict()
    assert open_below(tmp_path) == files > 0 and set(threading.enumerate()) <= threads
    own.stop()
    assert open_below(tmp_path) == 0


def test_weights_that_something_holds_on_to_are_seen(own: TorchEngine) -> None:
    own.start(CELL)
    held = own._replicas[0].block
    own.evict()
    assert own.memory_mb() == held.numel() / MIB > 0.0
    del held
    assert own.memory_mb() == 0.0
