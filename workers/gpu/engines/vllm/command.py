"""How a server is called: its arguments and its environment, from the services file and the devices. Pure.

| argument | from |
|---|---|
| `--uds` | the server's folder: a socket that only this user can reach |
| `--tensor-parallel-size` | the number of cells (CUDA) |
| `--gpu-memory-utilization` | `memory_mb`, less what the process itself takes, out of the whole device (CUDA) |
| `--enable-sleep-mode` | always (CUDA) |
| `--max-num-seqs` | `max_concurrency`, at least 8, since one call is a batch already |
| `--dtype` | `dtype`; what the checkpoint says is given in full, since vLLM's own `auto` makes float16 of float32 |
| `--runner pooling` | task `score`; and `--convert classify`, unless it is a reward model of vLLM's own |
| `--max-logprobs` | task `logprobs`: the most that a caller may ask for as `top_k`; vLLM's own bound is 20 |
| `--enable-lora --lora-modules --max-lora-rank` | `adapter`, under the service's name; the model itself is served as `NAME-base` |
| `--kv-cache-memory-bytes --enforce-eager` | always (CPU): the server's own check of free memory refuses most machines |

What the services file adds in `vllm.args` comes last and wins. Prefix caching and chunked prefill are as vLLM has them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from app.services_file import ConfigError, Dtype, ServiceConfig
from tangram.wire import MOST_TOP_K
from workers.gpu.devices import Device

LEAST_SEQUENCES = 8
_CPU_CACHE = "64M"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

_MODULE = "vllm.entrypoints.openai.api_server"
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "VLLM_API_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a server is to be."""

    name: str
    """The service, under whose name its questions go."""
    config: ServiceConfig
    dtype: Dtype
    """What the weights are held and computed in."""
    devices: Sequence[Device]
    device_mb: float
    """MiB that each of the devices has in all."""
    adapter_rank: int = 0
    """The rank of the LoRA adapter, if there is one."""

    @property
    def on_cuda(self) -> bool:
        """Whether the server computes on GPUs."""
        return self.devices[0].kind == "cuda"

    @property
    def with_adapters(self) -> bool:
        """Whether the server takes LoRA adapters."""
        return self.config.adapter is not None or any(word.replace("_", "-") == "--enable-lora" for word in self.config.vllm.args)

    @property
    def sequences(self) -> int:
        """How many sequences the server works on at a time, unless `vllm.args` says otherwise."""
        return max(self.config.max_concurrency, LEAST_SEQUENCES)

    @property
    def most_top_k(self) -> int:
        """The most likely tokens that the server gives for a position: as many as callers may ask for, unless `vllm.args` says fewer."""
        words = [part for word in self.config.vllm.args for part in word.split("=", 1)]
        said = [value for option, value in pairwise(words) if option.replace("_", "-") == "--max-logprobs"]
        # vLLM itself refuses what is no number; -1 is no bound.
        most = int(said[-1]) if said and said[-1].isdecimal() else MOST_TOP_K
        return min(most, MOST_TOP_K)

    def arguments(self, python: Path, socket: Path) -> list[str]:
        """Return the command. Raises `ConfigError` where `memory_mb` leaves the model nothing."""
        config = self.config
        served = self.name if config.adapter is None else f"{self.name}-base"
        words = [str(python), "-m", _MODULE, "--model", str(config.model), "--served-model-name", served, "--uds", str(socket)]
        words += ["--dtype", self.dtype, "--max-num-seqs", str(self.sequences), "--uvicorn-log-level", "warning"]
        if config.adapter is not None:
            words += ["--enable-lora", "--lora-modules", f"{self.name}={config.adapter}", "--max-lora-rank", str(self._max_rank())]
        if config.task == "score":
            words += ["--runner", "pooling"]
            words += ["--convert", "classify"] if config.vllm.pooling == "classify" else []
        else:
            words += ["--max-logprobs", str(MOST_TOP_K)]
        if self.on_cuda:
            words += ["--tensor-parallel-size", str(len(self.devices)), "--enable-sleep-mode"]
            words += ["--gpu-memory-utilization", f"{self._utilization():.4f}"]
        else:
            words += ["--enforce-eager", "--kv-cache-memory-bytes", _CPU_CACHE]
        return [*words, *config.vllm.args]

    def environment(self, base: Mapping[str, str], python: Path) -> dict[str, str]:
        """Return the server's environment: the worker's less what is the worker's own, then ours, then the file's.

        Programs that vLLM calls, such as ninja, are beside its interpreter `python`, so that folder leads the `PATH`.
        """
        env = {key: value for key, value in base.items() if key not in _NOT_INHERITED and not key.startswith("TANGRAM_")}
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        env["VLLM_SERVER_DEV_MODE"] = "1"
        env["PATH"] = os.pathsep.join(filter(None, [str(python.parent), base.get("PATH")]))
        if self.on_cuda:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible(base, self.devices))
        else:
            env["TORCHDYNAMO_DISABLE"] = "1"
        return env | self.config.vllm.env

    def _max_rank(self) -> int:
        """Return the least rank, of those that vLLM knows, that the adapter fits into."""
        for rank in _RANKS:
            if self.adapter_rank <= rank:
                return rank
        raise ConfigError(f"services.{self.name}.adapter: has rank {self.adapter_rank}, vLLM takes at most {_RANKS[-1]}")

    def _utilization(self) -> float:
        for_model = self.config.memory_mb - self.config.vllm.process_mb
        if for_model <= 0:
            least = f"more than vllm.process_mb ({self.config.vllm.process_mb:g})"
            raise ConfigError(f"services.{self.name}.memory_mb: must be {least}, which the server's process takes by itself")
        return min(1.0, for_model / self.device_mb)


def visible(base: Mapping[str, str], devices: Sequence[Device]) -> list[str]:
    """Return the devices as `CUDA_VISIBLE_DEVICES` and `nvidia-smi` name them: by their UUIDs, as their numbers differ between the two.

    Where a UUID is not known (AMD, an old torch), it is the entries of the worker's own variable, or numbers without it. A server reads
    them as the worker does, since it inherits `CUDA_DEVICE_ORDER`.
    """
    if all(device.uuid for device in devices):
        return [device.uuid for device in devices]
    given = [name.strip() for name in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    indices = [int(device.torch_device.partition(":")[2] or 0) for device in devices]
    return [given[index] if given else str(index) for index in indices]


def interpreter(config: ServiceConfig, base: Mapping[str, str], own: str) -> Path:
    """Return the interpreter of the service's server: its own, that of `TANGRAM_VLLM_PYTHON`, or the worker's (`own`)."""
    return config.vllm.python or Path(os.path.abspath(base.get("TANGRAM_VLLM_PYTHON") or own))
