"""Errors of environments and sandboxes.

Each is a `TangramError` and the fitting builtin, and can be rebuilt from its message alone. So it survives the trip through a
result backend. `cause` says whose fault it is (`tangram/ends.py`). How a *command* ended is not an error:
see `ExecOutcome`.
"""

from __future__ import annotations

from tangram.errors import TangramError


class SandboxError(TangramError):
    """Base of what can go wrong with an environment; by the infrastructure's fault, where a class says nothing else."""

    cause = "sandbox_failed"


class EnvironmentGone(SandboxError, LookupError):
    """Raised when an environment was never opened here, or has been closed."""

    def __init__(self, message: str = "", cause: str = "environment_lost") -> None:
        """Keep the message, and why the environment is gone where more is known than that it is."""
        super().__init__(message)
        self.cause = cause


class EnvironmentExists(SandboxError, FileExistsError):
    """Raised when an environment is opened a second time with another specification."""


class ImageUnsupported(SandboxError, ValueError):
    """Raised when an image is asked of a sandbox that has none."""

    cause = "bad_input"


class SnapshotUnsupported(SandboxError, NotImplementedError):
    """Raised when a snapshot is asked of environments that have none."""

    cause = "bad_input"


class SandboxInUse(SandboxError, BlockingIOError):
    """Raised when the base folder belongs to another living sandbox."""


class SessionUnavailable(SandboxError, ConnectionError):
    """Raised when a session's shell could not be started, or its supervisor is gone."""


class NotReady(SessionUnavailable):
    """Raised when a shell was started but never reported: what it starts with, the saved state, may be why."""


class MemoryFull(SessionUnavailable):
    """Raised when the kernel ended a session's shell while it started, since the memory of the environment was full."""

    cause = "out_of_memory"


class EngineUnavailable(SandboxError, ConnectionError):
    """Raised when there is no Docker engine, or it does not answer."""


class ContainerFailed(SandboxError, RuntimeError):
    """Raised when the engine refuses to make, start or change a container."""


class ImageMissing(SandboxError, FileNotFoundError):
    """Raised when an image is neither here nor to be had."""

    cause = "image_missing"


class StartTimeout(SandboxError, TimeoutError):
    """Raised when an environment did not stand within its start-up time."""

    cause = "open_timeout"


class DiskFull(SandboxError, OSError):
    """Raised when the node has too little free disk to open an environment."""


class ProcessesLeft(SandboxError, TimeoutError):
    """Raised when processes of a closed environment could not be ended in time."""


class NoSuchFile(SandboxError, FileNotFoundError):
    """Raised when a file to be read does not exist."""

    cause = "bad_input"


class PathIsDirectory(SandboxError, IsADirectoryError):
    """Raised when a path names a folder where a file is needed."""

    cause = "bad_input"


class FileTooLarge(SandboxError, OSError):
    """Raised when a file is larger than the sandbox passes in one piece."""

    cause = "bad_input"


class FileUnusable(SandboxError, OSError):
    """Raised when the operating system refuses a file for any other reason."""

    cause = "bad_input"


class NoSuchFolder(NoSuchFile):
    """Raised when the folder in which a command is to begin does not exist."""


class FolderUnusable(FileUnusable):
    """Raised when a command is to begin in what is no folder, or may not be entered."""


class NoSuchProgram(NoSuchFile):
    """Raised when the program that is to run a command does not exist."""


class ProgramUnusable(FileUnusable):
    """Raised when what is to run a command is no program, or may not be run."""


class DiskSpent(FileUnusable):
    """Raised when an environment has written all that it may."""

    cause = "disk_limit"


class FilesUnreachable(FileUnusable):
    """Raised when the node cannot serve a file, whatever it is: its disk is full or broken, or it has no descriptors left."""

    cause = "sandbox_failed"


class RequestUnusable(SandboxError, ValueError):
    """Raised when a request to a port of an environment cannot be sent, whoever listens."""

    cause = "bad_input"


class NoAnswer(SandboxError, ConnectionError):
    """Raised when a server in an environment does not answer as HTTP has it, or answers with more than may be passed on."""

    cause = "no_answer"


class NothingListens(NoAnswer):
    """Raised when nothing in an environment listens on a port."""
