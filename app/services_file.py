"""The services file: which models can be resident on GPU cells, and which outside APIs have limits.

The scheduler reads it to plan, the GPU worker to load. So this module knows the file and nothing else: no torch,
no SQL, no clock. Whatever is wrong ends as one `ConfigError`, one line naming file, service and key.

    [services.rm-small]
    engine = "torch"          # "stub" | "torch"
    task = "score"            # "score" (sequence classification) | "logprobs" (causal model)
    model = "models/rm-small" # a folder, relative to the file
    cells = [1]               # acceptable numbers of cells
    memory_mb = 200           # MiB it occupies on each of its cells while resident
    max_concurrency = 1       # calls at a time
    restore_s = 0.0           # declared estimate of a restore, seconds

    [quotas.search]
    rate_per_s = 50           # requests per second
    concurrency = 20          # requests at a time
    burst = 5                 # requests that may start at once after a pause
    tokens_per_min = 100000   # tokens per minute
    account = "acme"          # quotas of one account share its limits
    usage_header = "x-cost"   # header of an answer that says how many tokens it cost
    margin = 0.03             # part of the rates that is left unused
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from scheduler.model import QuotaSpec
from scheduler.resources.quota import clash
from tangram.errors import TangramError

CHUNKS = (1, 2, 4, 8)
_MOST_MB = 1 << 30


class ConfigError(TangramError, ValueError):
    """Raised when the services file, or a model folder it names, cannot be used."""


def _one_of_chunks(cells: list[int]) -> list[int]:
    """Refuse numbers of cells that no aligned chunk of the cell tree has."""
    if not cells or sorted(set(cells)) != cells or not set(cells) <= set(CHUNKS):
        raise ValueError("must be ascending, distinct numbers out of 1, 2, 4 and 8")
    return cells


def _known_engine(engine: object) -> object:
    """Say of the vLLM engine that it is not there, rather than that the word is unknown."""
    if engine == "vllm":
        raise ValueError("the vllm engine is not supported; use 'torch' or 'stub'")
    return engine


class _Table(BaseModel):
    """A table of the file: exact types, no unknown keys, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ServiceConfig(_Table):
    """One `[services.NAME]` table: a model that can be resident on GPU cells."""

    engine: Annotated[Literal["stub", "torch"], BeforeValidator(_known_engine)]
    """What computes: `torch` loads the model, `stub` answers deterministic numbers without one."""
    task: Literal["score", "logprobs"]
    """What the model is: `score` a sequence classifier with one label, `logprobs` a causal language model."""
    model: Path | None = Field(default=None, strict=False)
    """The model's folder; relative to the file in the file, absolute once loaded. A stub needs none."""
    cells: Annotated[list[int], AfterValidator(_one_of_chunks)] = [1]
    """Acceptable numbers of cells. A torch service keeps a replica on each of its cells and splits a batch over them."""
    memory_mb: float = Field(gt=0, le=_MOST_MB)
    """MiB it occupies on each of its cells while resident."""
    max_concurrency: int = Field(default=1, ge=1, le=10_000)
    """How many calls may run at once."""
    restore_s: float = Field(default=0.0, ge=0, le=86_400)
    """Declared estimate of a restore, seconds."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the weights are held and computed in."""
    separator: str = "\n"
    """What stands between prompt and response where both are plain text."""

    @model_validator(mode="after")
    def _torch_has_a_model(self) -> ServiceConfig:
        if self.engine == "torch" and self.model is None:
            raise ValueError("model: the torch engine needs a model folder")
        return self


class QuotaConfig(_Table):
    """One `[quotas.NAME]` table: the limits of an outside API, shared by every process.

    Of the quotas of one account at least one says its limits; those that do say the same.
    """

    rate_per_s: float | None = Field(default=None, gt=0, le=1e9)
    """Requests per second; none: no limit on the rate."""
    concurrency: int | None = Field(default=None, ge=1, le=10**9)
    """Requests at a time; none: no limit on how many."""
    burst: int | None = Field(default=None, ge=1, le=10**9)
    """Requests that may start at once after a pause; none: the scheduler's own choice."""

    tokens_per_min: float | None = Field(default=None, gt=0, le=1e12)
    """Tokens per minute; none: no limit on tokens."""
    account: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """The account whose limits these are; none: the quota is an account of its own."""
    usage_header: Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}$")] | None = None
    """Header of an answer that says how many tokens it cost; none: `usage.total_tokens` of a JSON answer."""
    margin: float = Field(default=0.03, ge=0, le=0.5)
    """Part of the rates that is left unused, for what differs in how long requests travel."""

    @model_validator(mode="after")
    def _limits_something(self) -> QuotaConfig:
        limits = (self.rate_per_s, self.concurrency, self.tokens_per_min)
        if self.account is None and all(limit is None for limit in limits):
            raise ValueError("must limit something: give rate_per_s, concurrency or tokens_per_min, or an account")
        if self.burst is not None and self.rate_per_s is None:
            raise ValueError("burst: means nothing without rate_per_s")
        return self


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ServicesFile(_Table):
    """The whole file."""

    services: dict[Name, ServiceConfig] = Field(default_factory=dict)
    """Services by name."""
    quotas: dict[Name, QuotaConfig] = Field(default_factory=dict)
    """Quotas by name."""

    @model_validator(mode="after")
    def _declares_something(self) -> ServicesFile:
        if not self.services and not self.quotas:
            raise ValueError("declares neither a service nor a quota")
        return self

    @model_validator(mode="after")
    def _accounts_agree(self) -> ServicesFile:
        if found := clash(self.quota_specs()):
            raise ValueError(f"quotas.{found[0]}: {found[1]}")
        return self

    def quota_specs(self, lead_s: float = 0.0) -> tuple[QuotaSpec, ...]:
        """Return the quotas as the scheduler has them; requests may be granted `lead_s` ahead of their time."""
        return tuple(QuotaSpec(name=name, lead_s=lead_s, **quota.model_dump()) for name, quota in self.quotas.items())


def load_services_file(path: Path) -> ServicesFile:
    """Read and check the services file; model folders come back absolute, and are not looked into.

    Raises `ConfigError` with one line that names the file and, where there is one, the table and key.
    """
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {_one_line(str(error))}") from error
    try:
        read = ServicesFile.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from error
    services = {name: _anchored(service, path.absolute().parent) for name, service in read.services.items()}
    return read.model_copy(update={"services": services})


def check_models(path: Path, file: ServicesFile) -> None:
    """Look into every model folder that the file names, on the machine that has to load them.

    Raises `ConfigError` with one line naming file, service and key `model`.
    """
    for name, service in file.services.items():
        if service.engine == "torch" and service.model is not None and (problem := model_problem(service.model)):
            raise ConfigError(f"{path}: services.{name}.model: {problem}")


def model_problem(folder: Path) -> str | None:
    """Say why a folder is no Hugging Face model folder, in one line; none where it looks like one."""
    shown = _one_line(str(folder))
    try:
        if not folder.exists():
            return f"{shown} does not exist"
        if not folder.is_dir():
            return f"{shown} is a file, not a model folder"
        if not (folder / "config.json").is_file():
            return f"{shown} has no config.json"
        if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
            return f"{shown} has no weights (*.safetensors)"
    except (OSError, ValueError) as error:
        return f"{shown} cannot be looked into: {_one_line(str(error))}"
    return None


def _anchored(service: ServiceConfig, base: Path) -> ServiceConfig:
    """Make the model's folder absolute."""
    return service if service.model is None else service.model_copy(update={"model": base / service.model})


def _first_problem(error: ValidationError) -> str:
    """Put the first of pydantic's findings on one line, as `table.key: what is wrong`."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    where = ".".join(_one_line(str(part)) for part in first["loc"] if part != "[key]")
    text = _one_line(first["msg"].removeprefix("Value error, "))
    if "[key]" in first["loc"]:
        text = "a name must be letters, digits, '.', '_' and '-', at most 64 of them"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {text}{more}" if where else f"{text}{more}"


def _one_line(text: str) -> str:
    """Keep a message on one printable line of bounded length."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown if len(shown) <= 300 else shown[:297] + "..."
