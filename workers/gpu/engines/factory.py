"""From a table of the services file to an engine. The one place that knows all kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from app.services_file import ConfigError, ServiceConfig
from workers.gpu.device_memory import DeviceMemory
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.stub import StubEngine


def create_engine(name: str, config: ServiceConfig, state_dir: Path, memory: DeviceMemory) -> Engine:
    """Make the absent engine of a service; torch is imported only for an engine that needs it.

    `state_dir` is the node's folder for host copies and logs, `memory` measures its devices.

    Raises `ConfigError` where a service names no model it needs, or packages of its engine are not installed here. Whether a vLLM
    service's interpreter has vLLM shows at its first start.
    """
    if config.engine == "stub":
        return StubEngine(name, config.task, config.memory_mb, config.max_concurrency)
    if config.model is None:
        raise ConfigError(f"services.{name}.model: the {config.engine} engine needs a model folder")
    if config.engine == "vllm":
        return _vllm(name, config, state_dir, memory)
    try:
        from workers.gpu.engines.texts import Wording
        from workers.gpu.engines.torch_hf import TorchEngine
    except ImportError as error:
        raise _without_torch(name, error) from error
    return TorchEngine(
        name,
        config.task,
        config.model,
        state_dir,
        max_concurrency=config.max_concurrency,
        dtype=config.dtype,
        wording=Wording.of(config),
    )


def open_contexts(devices: Sequence[Device], services: Mapping[str, ServiceConfig]) -> None:
    """Take what this process itself needs of each CUDA device, if a service of torch is declared.

    Raises `ConfigError` where torch is not installed here, `DeviceError` where a device cannot be used.
    """
    name = next((name for name, service in services.items() if service.engine == "torch"), None)
    if name is None or devices[0].kind != "cuda":
        return
    try:
        from workers.gpu.engines import torch_hf
    except ImportError as error:
        raise _without_torch(name, error) from error
    torch_hf.open_contexts(devices)


def _without_torch(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"services.{name}.engine: the torch engine needs the packages torch and transformers ({error})")


def _vllm(name: str, config: ServiceConfig, state_dir: Path, memory: DeviceMemory) -> Engine:
    try:
        from workers.gpu.engines.vllm.engine import VllmEngine
    except ImportError as error:
        needs = "the vllm engine needs the packages httpx and transformers in the worker"
        raise ConfigError(f"services.{name}.engine: {needs} ({error})") from error
    return VllmEngine(name, config, state_dir, memory)
