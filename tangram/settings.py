"""Every setting, in one typed place; each is read from the environment as `TANGRAM_<NAME>`.

Without a broker URL the *embedded stack* of the state folder is meant: `tangram up` writes `stack.json` there
with the addresses of what it started, and clients and tools read it.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from tangram.action import LONGEST_S
from tangram.errors import TangramError


def default_state_dir() -> Path:
    """Return the per-user state folder of the XDG base directory specification."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError:  # neither HOME nor an entry in the password file
        raise TangramError("this user has no home folder: set TANGRAM_STATE_DIR to the folder of the stack") from None
    return Path(base) / "tangram"


def _entries(text: object) -> object:
    """Return the entries of a list that the environment has as one text."""
    return [entry for entry in map(str.strip, text.split(",")) if entry] if isinstance(text, str) else text


def _pairs(text: object) -> object:
    """Return the entries of a table that the environment has as one text."""
    if not isinstance(text, str):
        return text
    pairs = [(name.strip(), number) for name, _, number in (entry.rpartition("=") for entry in map(str.strip, text.split(",")) if entry)]
    if not all(name for name, _ in pairs) or len(dict(pairs)) < len(pairs):
        raise ValueError(f"{text!r} is not like name=2,name=1, with each name once")
    return dict(pairs)


def _named(path: object) -> object:
    """Refuse the empty path, which would be the current folder."""
    if path == "":
        raise ValueError("is empty: name a path, or do not set it")
    return path


NamedPath = Annotated[Path, BeforeValidator(_named)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_entries)]
Numbers = Annotated[tuple[NonNegativeInt, ...], NoDecode, BeforeValidator(_entries)]
Counts = Annotated[dict[str, NonNegativeInt], NoDecode, BeforeValidator(_pairs)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Limit = Annotated[float, Field(gt=0, le=LONGEST_S)]
"""Seconds to wait for something. Sockets and locks take no infinite number."""
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Weights = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], NoDecode, BeforeValidator(_pairs)]


class Settings(BaseSettings):
    """The settings of a deployment. Changing URLs is all that a larger deployment needs."""

    model_config = SettingsConfigDict(env_prefix="TANGRAM_", extra="ignore", frozen=True)

    broker_url: str | None = Field(default=None, description="Celery broker: redis://, rediss://, redis+socket://, amqp:// or amqps://.")
    result_url: str | None = Field(default=None, description="Celery result backend; must be Redis, results are pushed over it.")
    database_url: str | None = Field(default=None, description="SQLAlchemy URL of the journal: sqlite:/// or postgresql+psycopg://.")
    state_dir: NamedPath = Field(default_factory=default_state_dir, description="Folder of the embedded stack, logs and SQLite.")

    policy: str = Field(default="elastic", description="Scheduling policy: elastic, paper, fcfs, fixed:N or static:N.")
    without: Words = Field(default=(), description="Comma-separated parts of the policy `elastic` to go without.")
    shares: Weights = Field(default={}, description="Weights of jobs for fair shares, like `job-a=2,job-b=1`; 1 where a job has none.")
    order_window_s: Seconds = Field(
        default=60.0, description="Seconds that a class of priority is worth in the queues for GPU cells and quotas."
    )
    history: NonNegativeInt = Field(
        default=20_000, description="Actions of the journal from which a starting scheduler learns durations and expected work."
    )
    keep_days: int | Literal["forever"] = Field(
        default=30, description="Days after which ended actions and environments are rolled up by the hour; 0 is the default, or `forever`."
    )
    keep_succeeded_days: int | Literal["forever"] = Field(
        default=3, description="Days after which actions that succeeded are rolled up; 0 is the default, `forever` as long as all others."
    )
    journal_mb: NonNegativeInt = Field(
        default=20_000, description="Size in MiB above which the journal gives up its oldest successes; 0 for no bound."
    )
    services_file: NamedPath | None = Field(default=None, description="TOML file that declares GPU services and API quotas.")
    queue_limit: Count = Field(default=100_000, description="Waiting actions allowed per job; beyond it they are rejected at once.")
    breaker_share: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Part of a job's actions of the last minute that may fail by the fault of this system. Beyond it the job is held back: "
        "its opens, and its actions outside of environments, wait and are tried one by one. 1 for never.",
    )
    breaker_least: Count = Field(default=20, description="Actions of a job that must have ended in the last minute before it is held back.")
    beat_s: Limit = Field(default=1.0, description="Interval of a worker's beats; three missed ones and the node is silent.")
    node_lost_s: Seconds = Field(
        default=60.0,
        description="Silence of a node after which it is lost, with its environments; at least three beats count. "
        "For so long, environments wait for the next worker when theirs is killed.",
    )
    hand_over_s: Seconds = Field(
        default=10.0,
        description="Seconds that a worker waits for what runs when SIGTERM has it hand its environments over to the next one.",
    )
    shards: Count = Field(
        default=1,
        description="Shards of the deployment: schedulers that lead at once, each with nodes of its own. The same for clients, workers and "
        "schedulers.",
    )
    shard: NonNegativeInt = Field(
        default=0, description="Which shard, from 0, this scheduler leads or this CPU worker is a node of. Other workers are of the first."
    )
    takeover_s: PositiveFloat = Field(default=5.0, description="Silence of the active scheduler after which a standby takes over.")
    lease_s: PositiveFloat = Field(
        default=3600.0, description="An environment without any action for this long is closed, unless it has a lease of its own."
    )
    orphan_s: Seconds = Field(
        default=60.0,
        description="Silence of a client after which its actions are cancelled and its environments closed; at least 5, or 0 for never.",
    )
    starting_limit: Count = Field(default=64, description="Environments that may be starting at once, over the whole fleet.")
    starts_per_s: PositiveFloat = Field(default=200.0, description="Environments that may begin to start per second, over the whole fleet.")
    usage_s: float = Field(default=1.0, ge=0.1, description="Interval at which workers say what running commands have used.")
    event_log: NamedPath | None = Field(default=None, description="File to which the scheduler adds every event and what followed from it.")
    timeout_s: Limit = Field(default=3600.0, description="Execution timeout of actions that name none, but for opens.")
    open_timeout_s: Limit = Field(
        default=1800.0, description="Time within which an environment must be open, fetching its image included, where its open names none."
    )
    output_limit_bytes: Count = Field(
        default=1_048_576, description="Captured output per stream; of more, the middle is left out, and results say `truncated`."
    )
    output_tail_fraction: float = Field(
        default=0.5, ge=0, le=1, description="Which part of that is kept of the end of longer output; the rest is kept of its beginning."
    )
    keep_output: Literal["all", "failed", "none"] = Field(
        default="failed",
        description="Commands whose text and last lines CPU workers have kept in the journal: all, failed (all but exit code 0) or none.",
    )
    depth: NonNegativeInt = Field(default=16, description="Waiting actions that the eviction estimate of the policy `paper` looks at.")
    outage_s: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Time for which a client bridges an outage of the broker or the result store; what is not done by then fails.",
    )
    connect_timeout_s: Limit = Field(default=5.0, description="Longest wait for a broker, store or database to answer.")

    sandbox: Literal["process", "docker"] = Field(
        default="process", description="What environments are on a CPU worker: process or docker."
    )
    isolation: Literal["auto", "bubblewrap", "view", "none"] = Field(
        default="auto",
        description="How the process sandbox sets commands apart: bubblewrap, view, none, or auto, the first of these that works.",
    )
    disk_floor_mb: NonNegativeInt = Field(
        default=512, description="Free disk below which a CPU worker opens no environment, MiB; 0 never refuses. Those that stand go on."
    )
    image: str | None = Field(default=None, description="Docker image of environments that name none.")
    image_pull: Literal["missing", "always", "never"] = Field(
        default="missing", description="When Docker images are fetched: missing, always or never."
    )
    image_pull_s: Limit = Field(
        default=1800.0, description="Time within which a Docker image must be fetched, however many environments wait for it."
    )
    image_cache_mb: Count | None = Field(
        default=None, description="Docker images fetched by the worker and not in use are dropped beyond this; by default never."
    )
    warm: Counts = Field(default={}, description="Containers that stand ready on a worker, by image: `python:3.12=4,node:22=2`.")
    container_user: str = Field(default="1000:1000", description="User and group, as numbers, that commands in containers run as.")
    container_network: str = Field(default="none", description="Name of the Docker network of containers; none is no network.")
    container_runtime: str | None = Field(
        default=None, description="Runtime of containers, one that the engine knows and whose processes the host sees, such as crun."
    )
    container_read_only: bool = Field(default=False, description="Let containers write to their work folder and /tmp only, both in memory.")
    container_memory_mb: int = Field(default=2048, ge=6, description="Memory of containers whose environment names none.")
    container_processes: Count = Field(default=512, description="Processes and threads of one container.")
    container_disk_mb: Count = Field(default=4096, description="What one container may write to disk.")
    container_start_s: Limit = Field(
        default=60.0,
        description="Time within which a container must stand once it starts, and the longest wait for an answer of the engine.",
    )
    containers_starting: Count = Field(default=4, description="Containers that start at once on one worker; more wait in line.")

    gateway_port: Port | None = Field(
        default=None, description="Port of 127.0.0.1 at which `tangram up` serves the gateway too; by default it does not."
    )
    gateway_body_mb: Count = Field(default=64, description="Largest body of a request that the gateway takes, MiB.")
    gateway_patience_s: PositiveFloat = Field(
        default=8.0,
        description="Seconds beyond its own timeouts for which the gateway holds a call of `/run_code` or `/run_jupyter`; after that its "
        "caller is to come again. Callers must wait for longer.",
    )
    gateway_reward_s: PositiveFloat = Field(
        default=100.0,
        description="Seconds for which the gateway holds a call for a reward of slime or OpenRLHF, which wait 120 s and 180 s; after that "
        "its caller is to come again.",
    )
    gateway_languages: NamedPath | None = Field(
        default=None, description="TOML file of languages for the gateway's `/run_code`, added to those that it comes with."
    )

    web_port: Port | None = Field(
        default=None, description="Port of 127.0.0.1 at which `tangram up` serves the live page; by default it does not."
    )
    web_token: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Token with which a person may cancel actions, close environments and drain nodes on the live page; "
        "without one it is read-only.",
    )
    metrics_port: Port | None = Field(
        default=None,
        description="Port at which each process serves its figures for Prometheus at `/metrics`; by default none does. The processes of "
        "`tangram up` take this port and those after it.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address at which figures for Prometheus are served.")
    metrics_jobs: Count = Field(default=50, description="Jobs that figures for Prometheus tell apart; further ones count as `other`.")
    otel: bool = Field(default=False, description="Send OpenTelemetry spans of actions; `OTEL_EXPORTER_OTLP_ENDPOINT` says where to.")

    node_name: str | None = Field(
        default=None,
        description="Name of this worker's node; by default host name and kind. In a container of compose's, a worker with "
        "`TANGRAM_SANDBOX=docker` takes host, project, service and number.",
    )
    cores: Count | None = Field(
        default=None,
        description="Cores that a CPU worker offers; by default those of its affinity mask, with process sandboxes at most its quota.",
    )
    reserved_cores: NonNegativeInt = Field(
        default=0, description="Cores that a CPU worker leaves to the system, whole physical ones where that can be."
    )
    memory_mb: Count | None = Field(default=None, description="Memory that a CPU worker offers; by default the host's.")
    memory: Literal["auto", "elastic", "fixed"] = Field(
        default="auto",
        description="Memory of a CPU worker's environments: elastic (granted as it is used), fixed (booked by their `memory_mb`), or auto. "
        "auto is elastic where the worker can pause environments.",
    )
    environments_max: Count | None = Field(
        default=None, description="Environments that a CPU worker holds at most; by default any number for which it has memory."
    )
    process_memory_mb: int | None = Field(
        default=None,
        ge=6,
        description="Memory of environments of the process sandbox that name none; by default half of what all may have together.",
    )
    cells: Count | None = Field(default=None, description="GPU cells that a GPU worker offers; by default one per CUDA device, else 1.")
    cell_memory_mb: Count | None = Field(
        default=None,
        description="MiB per GPU cell; by default what is free of it at the start, or without GPUs an equal share of half the memory.",
    )
    gpu_order: Numbers = Field(
        default=(),
        description="Numbers of a GPU worker's CUDA devices in the order of its cells, like `0,1,4,5`; by default CUDA's own order.",
    )
    vllm_python: NamedPath | None = Field(
        default=None, description="Interpreter of the environment that vLLM is installed in; by default a GPU worker's own."
    )
    host_memory_mb: Count | None = Field(
        default=None,
        description="Host memory for the copies of services that are off their cells; by default half of what the worker may use.",
    )
    labels: Words = Field(default=(), description="Comma-separated labels of this worker's node, matched by `requires`.")

    @field_validator("shard")
    @classmethod
    def _is_one_of_the_shards(cls, shard: int, info: ValidationInfo) -> int:
        if shard >= info.data.get("shards", shard + 1):
            raise ValueError(f"TANGRAM_SHARDS is {info.data['shards']}: name at most {info.data['shards'] - 1}")
        return shard

    @field_validator("orphan_s")
    @classmethod
    def _leaves_time_for_signs(cls, orphan_s: float) -> float:
        if 0 < orphan_s < 5:
            raise ValueError("clients give a sign of life every two seconds: name at least 5, or 0 for never")
        return orphan_s

    @field_validator("keep_days", "keep_succeeded_days")
    @classmethod
    def _can_be_days(cls, days: int | str, info: ValidationInfo) -> int | str:
        if isinstance(days, int) and days < 0:
            raise ValueError(f"{days} is neither a number of days nor `forever`")
        return days or cls.model_fields[str(info.field_name)].default

    @cached_property
    def stack_file(self) -> Path:
        """Where the embedded stack writes the addresses of what it started."""
        return self.state_dir / "stack.json"
