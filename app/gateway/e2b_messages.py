"""The messages of `/process.Process`, as far as they are read."""

from __future__ import annotations

from typing import Literal

from pydantic import Base64Bytes, BaseModel, Field


class Config(BaseModel):
    """A program to run."""

    cmd: str = Field(min_length=1)
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Size(BaseModel):
    """The size of a terminal, in characters."""

    rows: int = Field(ge=1, le=0xFFFF)
    cols: int = Field(ge=1, le=0xFFFF)


class Terminal(BaseModel):
    """A terminal."""

    size: Size


class StartMessage(BaseModel):
    """A program to start."""

    process: Config
    pty: Terminal | None = None
    tag: str | None = None
    stdin: bool = False


class Selector(BaseModel):
    """Which process is meant."""

    pid: int = 0
    tag: str = ""


class SelectMessage(BaseModel):
    """A message that names a process."""

    process: Selector = Selector()


class SignalMessage(SelectMessage):
    """A signal for a process."""

    signal: Literal["SIGNAL_SIGTERM", "SIGNAL_SIGKILL", 9, 15]


class Input(BaseModel):
    """Input for a process, or for its terminal."""

    stdin: Base64Bytes = b""
    pty: Base64Bytes = b""


class InputMessage(SelectMessage):
    """Input for a process that is named."""

    input: Input


class DataMessage(BaseModel):
    """Input for the process that the first message of the stream has named."""

    input: Input = Input()


class StreamInputMessage(BaseModel):
    """A message of a stream of input."""

    start: SelectMessage | None = None
    data: DataMessage | None = None


class UpdateMessage(SelectMessage):
    """Another size for the terminal of a process."""

    pty: Terminal | None = None
