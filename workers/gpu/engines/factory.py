"""From a table of the services file to an engine. The one place that knows all kinds."""

from __future__ import annotations

from pathlib import Path

from app.services_file import ConfigError, ServiceConfig
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.stub import StubEngine


def create_engine(name: str, config: ServiceConfig, state_dir: Path) -> Engine:
    """Make the absent engine of a service; torch is imported only for an engine that needs it.

    Raises `ConfigError` where a torch service names no model, or torch and transformers are not installed.
    """
    if config.engine == "stub":
        return StubEngine(name, config.task, config.memory_mb, config.max_concurrency)
    if config.model is None:
        raise ConfigError(f"services.{name}.model: the torch engine needs a model folder")
    try:
        from workers.gpu.engines.torch_hf import TorchEngine
    except ImportError as error:
        raise ConfigError(f"services.{name}.engine: the torch engine needs the packages torch and transformers ({error})") from error
    return TorchEngine(
        name,
        config.task,
        config.model,
        state_dir,
        max_concurrency=config.max_concurrency,
        dtype=config.dtype,
        separator=config.separator,
    )
