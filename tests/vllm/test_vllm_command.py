"""How a server is called: what is the worker's to say, and what the services file may add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.services_file import ConfigError
from tests.vllm.fakes import CPU, CUDA, Fake
from workers.gpu.devices import Device
from workers.gpu.engines.vllm.command import Launch, interpreter, visible

PYTHON, SOCKET = Path("/opt/vllm/bin/python"), Path("s")


def value(words: list[str], option: str) -> str:
    return words[len(words) - words[::-1].index(option)]


def launch(fake: Fake, devices: list[Device], **more: object) -> Launch:
    return Launch(name="rm", config=fake.config(**more), dtype="bfloat16", devices=devices, device_mb=80_000.0, adapter_rank=9)


def test_a_server_on_gpus_takes_its_memory_and_no_more_and_can_sleep(fake: Fake) -> None:
    words = launch(fake, CUDA, memory_mb=20_500.0).arguments(PYTHON, SOCKET)
    assert value(words, "--tensor-parallel-size") == "2"
    assert value(words, "--gpu-memory-utilization") == "0.2500"
    assert "--enable-sleep-mode" in words and "--kv-cache-memory-bytes" not in words
    assert words[words.index("--runner") : words.index("--runner") + 4] == ["--runner", "pooling", "--convert", "classify"]
    # It computes in the dtype that was found, and batches and caches as vLLM does
    assert value(words, "--dtype") == "bfloat16"
    assert not [word for word in words if "prefix-caching" in word or "chunked-prefill" in word]
    # A reward model of vLLM's own is not converted
    words = launch(fake, CUDA, vllm={"pooling": "reward"}).arguments(PYTHON, SOCKET)
    assert value(words, "--runner") == "pooling" and "--convert" not in words


def test_a_server_on_the_cpu_skips_the_check_of_memory_and_does_not_compile(fake: Fake) -> None:
    asked = launch(fake, CPU, task="logprobs")
    words = asked.arguments(PYTHON, SOCKET)
    assert "--kv-cache-memory-bytes" in words and "--enforce-eager" in words
    assert not {"--enable-sleep-mode", "--runner", "--gpu-memory-utilization"} & set(words)
    assert asked.environment({}, PYTHON)["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("args", "most"),
    [
        ([], 128),
        (["--max-logprobs", "20"], 20),
        (["--max_logprobs=7"], 7),
        (["--max-logprobs", "20", "--max-logprobs", "30"], 30),
        (["--max-logprobs=-1"], 128),
        (["--max-logprobs", "1000"], 128),
    ],
)
def test_a_teacher_gives_as_many_likely_tokens_as_callers_may_ask_for_unless_told_otherwise(fake: Fake, args: list[str], most: int) -> None:
    asked = launch(fake, CPU, task="logprobs", vllm={"args": args})
    assert value(asked.arguments(PYTHON, SOCKET)[: -len(args) or None], "--max-logprobs") == "128"
    assert asked.most_top_k == most
    assert "--max-logprobs" not in launch(fake, CPU).arguments(PYTHON, SOCKET)


def test_a_server_batches_as_many_calls_as_declared_and_what_the_services_file_adds_comes_last(fake: Fake) -> None:
    words = launch(fake, CUDA[:1], max_concurrency=64, vllm={"args": ["--max-num-seqs", "7"]}).arguments(PYTHON, SOCKET)
    assert words.index("--max-num-seqs") < len(words) - 2 and value(words, "--max-num-seqs") == "7"
    assert words[words.index("--max-num-seqs") + 1] == "64"


def test_an_adapter_is_served_under_the_services_name_and_the_model_under_another(fake: Fake, tmp_path: Path) -> None:
    asked = launch(fake, CUDA[:1], task="logprobs", adapter=tmp_path / "adapter")
    words = asked.arguments(PYTHON, SOCKET)
    assert "--enable-lora" in words
    assert (value(words, "--lora-modules"), value(words, "--served-model-name")) == (f"rm={tmp_path / 'adapter'}", "rm-base")
    # The least of the ranks that vLLM allocates for
    assert value(words, "--max-lora-rank") == "16"
    with pytest.raises(ConfigError, match=r"services\.rm\.adapter: has rank 513, vLLM takes at most 512"):
        replace(asked, adapter_rank=513).arguments(PYTHON, SOCKET)


def test_vllm_is_where_the_service_says_or_else_the_worker(fake: Fake) -> None:
    base = {"TANGRAM_VLLM_PYTHON": "/opt/vllm/bin/python"}
    assert interpreter(fake.config(), base, "/own/python") == fake.python
    nowhere = fake.config(vllm={"python": None})
    assert interpreter(nowhere, base, "/own/python") == Path("/opt/vllm/bin/python")
    assert interpreter(nowhere, {}, "/own/python") == Path("/own/python")


def test_memory_that_leaves_the_model_nothing_is_refused(fake: Fake) -> None:
    with pytest.raises(ConfigError, match=r"services\.rm\.memory_mb: must be more than vllm\.process_mb \(500\)"):
        launch(fake, CUDA[:1], memory_mb=500.0).arguments(PYTHON, SOCKET)


def test_a_server_sees_its_own_devices_and_none_of_the_workers_secrets(fake: Fake) -> None:
    base = {"CUDA_VISIBLE_DEVICES": "4,GPU-77", "TANGRAM_BROKER_URL": "secret", "PYTHONPATH": "x", "PATH": "p"}
    env = launch(fake, CUDA[1:]).environment(base, PYTHON)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-77" and env["PATH"] == "/opt/vllm/bin:p"
    assert not {"TANGRAM_BROKER_URL", "PYTHONPATH"} & set(env)
    assert (env["HF_HUB_OFFLINE"], env["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    assert launch(fake, CUDA).environment({}, PYTHON)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_server_is_told_its_devices_by_uuid_since_numbers_mean_others_to_the_drivers_tool(fake: Fake) -> None:
    # Given devices that CUDA lists in another order than the PCI bus, seen through a variable of the worker's own
    devices = [replace(device, uuid=uuid) for device, uuid in zip(CUDA, ["GPU-b", "GPU-a"], strict=True)]
    base = {"CUDA_VISIBLE_DEVICES": "7,3"}
    # Then the server, and what measures it, are given the devices themselves
    assert launch(fake, devices).environment(base, PYTHON)["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert visible(base, devices[1:]) == ["GPU-a"]
    assert visible(base, [devices[0], CUDA[1]]) == ["7", "3"]
