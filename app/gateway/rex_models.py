"""What SWE-ReX 1.4.0 and ROCK 1.11.0 send, as far as it is used here; meanings are those of `swerex.runtime.abstract`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from tangram.action import LONGEST_S

Check = Literal["silent", "raise", "ignore"]
Seconds = Annotated[float | None, Field(gt=0, le=LONGEST_S)]
Patterns = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
Path = Annotated[str, Field(min_length=1)]


class CreateSession(BaseModel):
    """A new shell; `startup_source` are files that it reads first, within `startup_timeout` seconds."""

    session: str = "default"
    session_type: Literal["bash"] = "bash"
    startup_source: list[str] = []
    startup_timeout: Seconds = 1.0
    env: dict[str, str] | None = None


class BashAction(BaseModel):
    """A command for a shell, or a line for its interactive program; `expect` are patterns at which that waits for the next line."""

    action_type: Literal["bash"] = "bash"
    session: str = "default"
    command: str
    timeout: Seconds = None
    check: Check = "raise"
    error_msg: str = ""
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    expect: Patterns = []


class BashInterrupt(BaseModel):
    """An interrupt of what runs in a shell: Ctrl-C so many times, each with `timeout` seconds to take effect."""

    action_type: Literal["bash_interrupt"]
    session: str = "default"
    timeout: Seconds = 0.2
    n_retry: int = Field(default=3, ge=1, le=100)
    expect: Patterns = []


SessionAction = Annotated[BashAction | BashInterrupt, Field(discriminator="action_type")]


class CloseSession(BaseModel):
    """The end of a shell."""

    session: str = "default"


class Command(BaseModel):
    """A program outside of any shell, with the parameters of Python's `subprocess.run`."""

    command: str | Annotated[list[str], Field(min_length=1)]
    shell: bool = False
    timeout: Seconds = None
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False

    @property
    def argv(self) -> list[str]:
        """The program and its arguments."""
        words = [self.command] if isinstance(self.command, str) else self.command
        return ["/bin/sh", "-c", *words] if self.shell else words


class ReadFile(BaseModel):
    """A text file to read, as by Python's `Path.read_text`."""

    path: Path
    encoding: str | None = None
    errors: str | None = None


class WriteFile(BaseModel):
    """A text file to write, UTF-8."""

    path: Path
    content: str


class SessionStarted(BaseModel):
    """What the startup files printed."""

    output: str = ""
    session_type: Literal["bash"] = "bash"


class Observation(BaseModel):
    """How a command in a shell ended."""

    output: str = ""
    exit_code: int | None = None
    failure_reason: str = ""
    expect_string: str = ""
    session_type: Literal["bash"] = "bash"


class SessionClosed(BaseModel):
    """A shell is closed."""

    session_type: Literal["bash"] = "bash"


class CommandDone(BaseModel):
    """How a program ended; a signal n is exit code 128 + n."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


class FileRead(BaseModel):
    """A file's text."""

    content: str


class Alive(BaseModel):
    """Whether calls can be served."""

    is_alive: bool
    message: str = ""


class Done(BaseModel):
    """Nothing more is to be said."""
