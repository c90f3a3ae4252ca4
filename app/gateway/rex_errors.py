"""Failures as SWE-ReX's client rebuilds them: by the path of a class, and a message."""

from __future__ import annotations

from typing import Any

from app.gateway.errors import BadRequest, GatewayError
from app.gateway.rex_models import BashAction, Command
from tangram.errors import ArgumentsTooLong, InvalidAction


class RemoteError(GatewayError):
    """Raised for what the client is to raise as the class at `class_path`; `info` goes with it."""

    status, kind = 511, "remote"

    def __init__(self, class_path: str, message: str, **info: Any) -> None:
        super().__init__(message)
        self.class_path, self.info = class_path, info

    @property
    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        fields = {"message": str(self), "class_path": self.class_path, "traceback": "", "extra_info": self.info}
        return {"swerexception": fields}


def swerex_error(name: str, message: str, **info: Any) -> RemoteError:
    """Return an error of SWE-ReX's own."""
    return RemoteError(f"swerex.exceptions.{name}", message, **info)


def non_zero(body: BashAction | Command, code: int | None, printed: str) -> RemoteError:
    """Return SWE-ReX's error for a command that has failed and was not to."""
    message = f"Command {body.command!r} failed with exit code {code}. {printed}"
    return swerex_error("NonZeroExitCodeError", f"{body.error_msg}: {message}" if body.error_msg else message)


def no_such(path: str) -> RemoteError:
    """Return Python's error for a file, folder or program that is not there."""
    return RemoteError("builtins.FileNotFoundError", f"[Errno 2] No such file or directory: {path!r}")


def denied(path: str) -> RemoteError:
    """Return Python's error for a file that may not be used."""
    return RemoteError("builtins.PermissionError", f"[Errno 13] Permission denied: {path!r}")


def is_folder(path: str) -> RemoteError:
    """Return Python's error for a folder where a file was expected."""
    return RemoteError("builtins.IsADirectoryError", f"[Errno 21] Is a directory: {path!r}")


def os_error(message: str) -> RemoteError:
    """Return Python's error for files that cannot be written or read as they are."""
    return RemoteError("builtins.OSError", message)


def of_file(path: str, error: BadRequest) -> GatewayError:
    """Return Python's error for a file that cannot be used, or the error itself where Python has none."""
    match error.problem:
        case "NoSuchFile" | "NoSuchFolder" | "NoSuchProgram":
            return no_such(path)
        case "ProgramUnusable":
            return denied(path)
        case "PathIsDirectory":
            return is_folder(path)
        case "FileUnusable" | "FileTooLarge" | "FolderUnusable":
            return os_error(str(error))
    return error


def of_arguments(error: InvalidAction) -> RemoteError:
    """Return Python's error for a program whose arguments or variables it cannot be given."""
    return (
        os_error(f"[Errno 7] Argument list too long: {error}")
        if isinstance(error, ArgumentsTooLong)
        else RemoteError("builtins.ValueError", str(error))
    )


def of_failure(error: GatewayError) -> RemoteError:
    """Return what a failure that is not the program's is for a client, which takes it for the end of the rollout and never for a result."""
    info = {"kind": error.kind, "cause": error.cause, "fault": error.fault}
    return swerex_error("DeploymentNotStartedError" if error.kind == "not_found" else "SwerexException", str(error), **info)
