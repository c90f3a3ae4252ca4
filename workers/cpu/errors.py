"""Errors of environments and sandboxes.

Each is a `TangramError` and the fitting builtin, and each can be rebuilt from one string, its message, so that
it survives the trip through a result backend. How a *command* ended is not an error: see `ExecOutcome`.
"""

from __future__ import annotations

from tangram.errors import TangramError


class SandboxError(TangramError):
    """Base of what can go wrong with an environment."""


class EnvironmentGone(SandboxError, LookupError):
    """Raised when an environment was never opened here, or has been closed."""


class EnvironmentExists(SandboxError, FileExistsError):
    """Raised when an environment is opened a second time with another specification."""


class ImageUnsupported(SandboxError, ValueError):
    """Raised when an image is asked of a sandbox that has none."""


class SnapshotUnsupported(SandboxError, NotImplementedError):
    """Raised when a snapshot is asked of environments that have none."""


class SandboxInUse(SandboxError, BlockingIOError):
    """Raised when the base folder belongs to another living sandbox."""


class SessionUnavailable(SandboxError, ConnectionError):
    """Raised when a session's shell could not be started, or its supervisor is gone."""


class EngineUnavailable(SandboxError, ConnectionError):
    """Raised when there is no Docker engine, or it does not answer."""


class ContainerFailed(SandboxError, RuntimeError):
    """Raised when the engine refuses to make, start or change a container."""


class ImageMissing(SandboxError, FileNotFoundError):
    """Raised when an image is neither here nor to be had."""


class StartTimeout(SandboxError, TimeoutError):
    """Raised when an environment did not stand within its start-up time."""


class ProcessesLeft(SandboxError, TimeoutError):
    """Raised when processes of a closed environment could not be ended in time."""


class NoSuchFile(SandboxError, FileNotFoundError):
    """Raised when a file to be read does not exist."""


class PathIsDirectory(SandboxError, IsADirectoryError):
    """Raised when a path names a folder where a file is needed."""


class PathOutside(SandboxError, PermissionError):
    """Raised when a path leads out of the environment."""


class FileTooLarge(SandboxError, OSError):
    """Raised when a file is larger than the sandbox passes in one piece."""


class FileUnusable(SandboxError, OSError):
    """Raised when the operating system refuses a file for any other reason."""
