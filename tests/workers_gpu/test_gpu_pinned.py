"""Pinned copies and side streams, with a CUDA runtime that only records its calls.

What is checked is what the code asks of CUDA and in which order; the bytes are really copied, between host tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.kinds import Shelf
from tests.lazily import Lazily, needs
from workers.gpu.devices import MIB, Device
from workers.gpu.errors import EngineFailed

if TYPE_CHECKING:
    from workers.gpu.engines.host_copy import PinnedCopy
    from workers.gpu.engines.torch_hf import TorchEngine

pytestmark = needs("torch", "transformers")
torch = Lazily("torch")
compute, host_copy, pinned_blocks, side_streams, torch_hf = (
    Lazily(f"workers.gpu.engines.{name}") for name in ("compute", "host_copy", "pinned", "side_streams", "torch_hf")
)


class Cuda:
    """What was asked, in order; `code` is what pinning answers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.pinned: dict[int, int] = {}
        self.code = 0
        self.breaks_at: int | None = None
        self.peak_mb = 0

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert flags == 1
        if not self.code:
            self.pinned[start] = size
        return self.code

    def cudaHostUnregister(self, start: int) -> int:
        del self.pinned[start]
        return 0

    def note(self, call: str) -> None:
        self.calls.append(call)

    def stream(self, device: Any = None) -> Any:
        self.note("stream made")
        return SimpleNamespace(wait_stream=lambda other: self.note(f"waits for {other}"), synchronize=lambda: self.note("stream awaited"))

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: self.note("event recorded"), synchronize=lambda: self.note("event awaited"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake = Cuda()

    class DeviceBlock(torch.Tensor):  # type: ignore[misc]
        """A host tensor that says what is done to it, as one on a device."""

        def record_stream(self, stream: Any) -> None:
            fake.calls.append("block bound to the stream")

        def copy_(self, source: Any, non_blocking: bool = False) -> Any:
            assert non_blocking
            if fake.breaks_at == len(fake.calls):
                raise RuntimeError("CUDA error: an illegal memory access")
            fake.calls.append("piece")
            return super().copy_(source)

    # This imports transformers, whose annotations need the classes that are replaced below.
    monkeypatch.setattr("workers.gpu.engines.torch_hf._BATCH_TOKENS", 1024)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "Stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("a whole device was waited for"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: (100 + fake.peak_mb) * MIB)
    monkeypatch.setattr("workers.gpu.engines.side_streams.PIECE", 1000)
    real = torch.empty

    def empty(*size: Any, **words: Any) -> Any:
        made = real(*size, **words)
        return made.as_subclass(DeviceBlock) if words.get("dtype") is torch.uint8 else made

    monkeypatch.setattr("torch.empty", empty)
    yield fake
    assert fake.pinned == {}, "something is still pinned"


@pytest.fixture
def engine(models: Path, tmp_path: Path) -> TorchEngine:
    return torch_hf.TorchEngine("teacher-0", "logprobs", models / "teacher-0", tmp_path)


def filled(copy: PinnedCopy) -> Any:
    return copy.block.copy_(torch.randint(0, 256, (copy.block.numel(),), dtype=torch.uint8))


def test_a_copy_waits_for_the_compute_stream_before_and_for_its_own_events_after(cuda: Cuda) -> None:
    copy = host_copy.PinnedCopy(2500)
    want = filled(copy).clone()
    blocks = [torch.empty(2500, dtype=torch.uint8) for _ in range(2)]
    copy.load(blocks[:1])
    first, cuda.calls = cuda.calls, []
    copy.load(blocks)
    one = ["waits for compute", "block bound to the stream", "piece", "piece", "piece", "event recorded"]
    assert first == ["stream made", *one, "event awaited"]
    assert cuda.calls == [*one, *one, "event awaited", "event awaited"]
    assert all(torch.equal(block.as_subclass(torch.Tensor), want) for block in blocks)
    del want
    copy.close()


def test_a_copy_that_breaks_is_waited_for_before_the_pinned_bytes_can_go(cuda: Cuda) -> None:
    copy = host_copy.PinnedCopy(2500)
    blocks = [torch.empty(2500, dtype=torch.uint8) for _ in range(2)]
    cuda.breaks_at = len(["stream made", *["."] * 6, "waits for compute", "block bound to the stream"])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copy.load(blocks)
    assert cuda.calls[-2:] == ["stream awaited", "event awaited"]
    copy.close()


def test_pinned_memory_is_exactly_as_large_as_asked_for_and_goes_with_the_last_that_refers_to_it(cuda: Cuda) -> None:
    pinned = pinned_blocks.PinnedBlock(5 * MIB + 1)
    assert list(cuda.pinned.values()) == [5 * MIB + 1]
    assert pinned.block.data_ptr() % 4096 == 0
    view = pinned.block[100:200]
    pinned.close()
    pinned.close()
    # What something refers to counts until nothing does
    assert pinned.held_bytes() == 5 * MIB + 1 and int(view.sum()) == 0
    del view
    assert pinned.held_bytes() == 0
    with pytest.raises(RuntimeError, match="closed"):
        pinned.block  # noqa: B018


def test_a_host_that_cannot_pin_says_so_and_keeps_nothing(cuda: Cuda, engine: TorchEngine) -> None:
    cuda.code = 2
    with pytest.raises(EngineFailed, match=r"CUDA cannot pin 0 MiB of host memory \(error 2\)"):
        engine.start([Device("cuda:0", "cuda", 1000, "cpu")])
    assert (engine.state, engine.memory_mb(), engine.host_mb()) == ("failed", 0.0, 0.0)


def test_an_engine_beside_cuda_loads_into_pinned_memory_and_evicts_without_a_copy(cuda: Cuda, engine: TorchEngine, shelf: Shelf) -> None:
    gpus = [Device(f"cuda:{index}", "cuda", 1000, "cpu") for index in range(3)]
    sequences = [[5, 17, 33], list(range(100, 180))]
    plain = shelf.engine("torch", "logprobs")
    want = plain.logprobs(sequences)
    # Given an engine that is started on one device
    engine.start(gpus[:1])
    assert engine.logprobs(sequences) == want
    assert engine.host_mb() == pytest.approx(engine.memory_mb())
    # When it is evicted
    cuda.calls.clear()
    engine.evict()
    # Then nothing was copied, and its host copy is what it was
    assert cuda.calls == []
    assert engine.memory_mb() == 0.0
    assert engine.host_mb() == pytest.approx(plain.memory_mb())
    # And it comes back on other devices and on more of them, with one stream and one event for each copy
    engine.restore(gpus[1:])
    assert cuda.calls.count("event awaited") == cuda.calls.count("event recorded") == 2
    assert engine.logprobs(sequences) == [pytest.approx(row, abs=1e-5) for row in want]
    # And gives back what it pinned when it is stopped
    engine.stop()
    assert (cuda.pinned, engine.host_mb(), engine.memory_mb()) == ({}, 0.0, 0.0)


def test_what_the_largest_batch_takes_of_a_cuda_device_is_held_beside_the_weights(cuda: Cuda, engine: TorchEngine) -> None:
    gpus = [Device(f"cuda:{index}", "cuda", 1000, "cpu") for index in range(2)]
    cuda.peak_mb = 70
    engine.start(gpus)
    weights_mb = engine.host_mb()
    assert engine.held_mb() == [pytest.approx(weights_mb + 70)] * 2
    engine.evict()
    assert engine.memory_mb() == 0.0
    engine.restore(gpus[1:])
    assert engine.held_mb() == [pytest.approx(weights_mb + 70)]
    engine.stop()


def test_a_device_without_room_for_the_largest_batch_is_named(cuda: Cuda, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: Any, batch: list[list[int]]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("workers.gpu.engines.compute.logprobs", full)
    with pytest.raises(EngineFailed, match=r"no room beside the weights on cuda:0 for a batch of 1024 tokens") as kept:
        engine.start([Device("cuda:0", "cuda", 1000, "cpu")])
    assert kept.value.__cause__ is not None  # nor does an error that is kept hold weights
    assert (engine.state, engine.memory_mb(), engine.host_mb()) == ("failed", 0.0, 0.0)


def test_an_engine_that_may_keep_no_copy_makes_it_when_it_is_evicted(cuda: Cuda, engine: TorchEngine) -> None:
    gpu = [Device("cuda:0", "cuda", 1000, "cpu")]
    assert engine.copies_at_start(gpu)
    engine.may_copy(0.01)
    engine.start(gpu)
    assert (cuda.pinned, engine.host_mb()) == ({}, 0.0)
    before, held_mb = engine.logprobs([[5, 17, 33]]), engine.memory_mb()
    engine.evict()
    assert (engine.memory_mb(), engine.host_mb()) == (0.0, pytest.approx(held_mb))
    engine.restore(gpu)
    assert engine.logprobs([[5, 17, 33]]) == before
    engine.stop()
