"""The services file: which models can be resident on GPU cells, and which outside APIs have limits.

The scheduler reads it to plan, the GPU worker to load. So this module knows the file and nothing else: no torch,
no SQL, no clock. Whatever is wrong ends as one `ConfigError`, one line naming file, service and key.

docs/services.md and docs/quotas.md describe its keys.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.hosts import HostNames
from scheduler.model import QuotaSpec
from scheduler.quotas.account import clash
from tangram.errors import TangramError

CHUNKS = (1, 2, 4, 8)

Dtype = Literal["float32", "bfloat16", "float16"]
"""What weights are held and computed in."""

DeclaredDtype = Literal["auto", Dtype]
"""A dtype, or `auto`: the one that the checkpoint says."""

DTYPES: tuple[Dtype, ...] = get_args(Dtype)

_MOST_CALLS = {"vllm": 64, "torch": 16}
_MOST_MB = 1 << 30
_SET_BY_THE_WORKER = frozenset(
    {
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--uds",
        "--api-key",
        "--ssl-keyfile",
        "--root-path",
        "--runner",
        "--convert",
        "--tensor-parallel-size",
        "-tp",
        "--pipeline-parallel-size",
        "-pp",
        "--data-parallel-size",
        "-dp",
        "--enable-sleep-mode",
        "--no-enable-sleep-mode",
    }
)


class ConfigError(TangramError, ValueError):
    """Raised when the services file, or a model folder it names, cannot be used."""


def _one_of_chunks(cells: list[int]) -> list[int]:
    """Refuse numbers of cells that no aligned chunk of the cell tree has."""
    if not cells or sorted(set(cells)) != cells or not set(cells) <= set(CHUNKS):
        raise ValueError("must be ascending, distinct numbers out of 1, 2, 4 and 8")
    return cells


def _with_both_texts(template: str) -> str:
    """Refuse a template that leaves out a text."""
    for name in ("{prompt}", "{response}"):
        if template.count(name) != 1:
            raise ValueError(f"must have {name} once")
    return template


def _usual_calls(table: dict[str, Any]) -> int:
    """Return how many calls an engine takes at a time; a batch of vLLM is large, a stub computes nothing."""
    return _MOST_CALLS.get(table.get("engine", ""), 1)


class _Table(BaseModel):
    """A table of the file: exact types, no unknown keys, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class VllmConfig(_Table):
    """The table `[services.NAME.vllm]`: how the server of a vLLM service is started."""

    python: Path | None = Field(default=None, strict=False)
    """The interpreter of the environment that vLLM is installed in; none: `TANGRAM_VLLM_PYTHON`, otherwise the worker's own."""
    pooling: Literal["classify", "reward"] = "classify"
    """What the server computes for task `score`: `classify` the logit of a sequence classifier, `reward` the value that a reward
    model of vLLM's own (`…ForRewardModel`) gives the last token."""
    args: tuple[str, ...] = Field(default=(), strict=False)
    """Further arguments of the server, as its command line takes them."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the server."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds within which the server must have answered its first request."""
    process_mb: float = Field(default=1024.0, ge=0, le=_MOST_MB)
    """MiB of each of its cells that the server takes on top of what vLLM plans with: context, CUDA graphs, workspaces."""
    sleep_on_cpu: bool = False
    """For tests: on CPU devices, too, a server that is evicted sleeps, though there that frees nothing; else it is stopped."""

    @model_validator(mode="after")
    def _leaves_the_worker_its_own(self) -> VllmConfig:
        for word in self.args:
            option = word.partition("=")[0].replace("_", "-")
            if option in _SET_BY_THE_WORKER:
                raise ValueError(f"args: {option} is set by the worker")
        if own := [name for name in self.env if name in ("CUDA_VISIBLE_DEVICES", "TMPDIR", "VLLM_SERVER_DEV_MODE")]:
            raise ValueError(f"env: {own[0]} is set by the worker")
        return self


class ServiceConfig(_Table):
    """One `[services.NAME]` table: a model that can be resident on GPU cells."""

    engine: Literal["stub", "torch", "vllm"]
    """What computes: `torch` loads the model, `vllm` has a server of its own do so, `stub` answers deterministic numbers without one."""
    task: Literal["score", "logprobs"]
    """What the model is: `score` a sequence classifier with one label, `logprobs` a causal language model."""
    model: Path | None = Field(default=None, strict=False)
    """The model's folder; relative to the file in the file, absolute once loaded. A stub needs none."""
    cells: Annotated[list[int], AfterValidator(_one_of_chunks)] = [1]
    """Acceptable numbers of cells. A torch service keeps a replica on each of its cells and splits a batch over them, a vLLM
    service is split over them itself (tensor parallelism)."""
    memory_mb: float = Field(gt=0, le=_MOST_MB)
    """MiB it occupies on each of its cells while resident."""
    host_memory_mb: float | None = Field(default=None, gt=0, le=_MOST_MB)
    """MiB of host memory that its restorable copy takes; none: `memory_mb` times its least number of cells."""
    max_concurrency: int = Field(default_factory=_usual_calls, ge=1, le=10_000)
    """How many calls may run at once; none: 64 with vLLM, 16 with torch, 1 with a stub."""
    instances: int | None = Field(default=None, ge=1, le=10_000)
    """How many instances of it a node may hold; none: as many as the scheduler finds worth their cells."""
    restore_s: float = Field(default=0.0, ge=0, le=86_400)
    """Declared estimate of a restore, seconds."""
    pinned: bool = False
    """Whether it is never evicted once it is resident."""
    warm: bool = False
    """Whether it is brought onto cells when its node joins, before anybody asks for it."""
    dtype: DeclaredDtype = "auto"
    """What the weights are held and computed in; `auto`: what the checkpoint says."""
    separator: str = "\n"
    """What stands between prompt and response where both are plain text."""
    score_template: Annotated[str, AfterValidator(_with_both_texts)] | None = None
    """How prompt and response of plain text are put together, with `{prompt}` and `{response}`; none: with the separator."""
    chat_template: Path | None = Field(default=None, strict=False)
    """A file with the Jinja template of conversations, relative to the file; none: the tokenizer's own."""
    adapter: Path | None = Field(default=None, strict=False)
    """The folder of a LoRA adapter for the model, relative to the file; only with vLLM."""

    vllm: VllmConfig = VllmConfig()
    """How the server is started, with engine `vllm`."""

    @model_validator(mode="after")
    def _has_what_its_engine_needs(self) -> ServiceConfig:
        if self.engine != "stub" and self.model is None:
            raise ValueError(f"model: the {self.engine} engine needs a model folder")
        if self.engine != "vllm" and "vllm" in self.model_fields_set:
            raise ValueError(f"vllm: means nothing with engine {self.engine!r}")
        if self.engine != "vllm" and self.adapter is not None:
            instead = "use engine 'vllm', or a folder into which the adapter is merged"
            raise ValueError(f"adapter: the {self.engine} engine loads none: {instead}")
        return self

    @model_validator(mode="after")
    def _puts_texts_together_in_one_way(self) -> ServiceConfig:
        if {"separator", "score_template"} <= self.model_fields_set:
            raise ValueError("separator: means nothing beside score_template")
        for key in ("score_template", "chat_template"):
            if self.task != "score" and key in self.model_fields_set:
                raise ValueError(f"{key}: means nothing with task {self.task!r}")
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
    hosts: HostNames | None = None
    """The hosts that its requests may reach: names, addresses and networks (`app/hosts.py`); none: all with public addresses."""

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
        return tuple(QuotaSpec(name=name, lead_s=lead_s, **quota.model_dump(exclude_none=True)) for name, quota in self.quotas.items())


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
    """Look for the models, adapters and templates that the file names, on the machine that has to load them.

    Raises `ConfigError` with one line naming file, service and key.
    """
    for name, service in file.services.items():
        if service.engine != "stub" and service.model is not None and (problem := model_problem(service.model)):
            raise ConfigError(f"{path}: services.{name}.model: {problem}")
        if service.adapter is not None and not _is_file(service.adapter / "adapter_config.json"):
            raise ConfigError(f"{path}: services.{name}.adapter: {_one_line(str(service.adapter))} has no adapter_config.json")
        if service.chat_template is not None and not _is_file(service.chat_template):
            raise ConfigError(f"{path}: services.{name}.chat_template: {_one_line(str(service.chat_template))} is no file")


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


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _anchored(service: ServiceConfig, base: Path) -> ServiceConfig:
    if service.vllm.python is not None:
        service = service.model_copy(update={"vllm": service.vllm.model_copy(update={"python": base / service.vllm.python})})
    paths = {key: getattr(service, key) for key in ("model", "adapter", "chat_template")}
    return service.model_copy(update={key: base / path for key, path in paths.items() if path is not None})


def _first_problem(error: ValidationError) -> str:
    """Put the first of pydantic's findings on one line, as `table.key: what is wrong`."""
    # A default that depends on another key counts as a problem of its own once any key is wrong.
    problems = [one for one in error.errors(include_url=False, include_context=False) if one["type"] != "default_factory_not_called"]
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
