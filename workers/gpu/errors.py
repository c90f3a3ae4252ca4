"""The errors of the GPU worker. Every error carries one line for a person and can be rebuilt from that line alone."""

from __future__ import annotations

from traceback import clear_frames

from tangram.errors import TangramError

_LONGEST = 300


class GpuError(TangramError):
    """Base of the errors of the GPU worker; by the infrastructure's fault, where a class says nothing else."""

    cause = "engine_failed"


class BadInput(GpuError, ValueError):
    """Raised when a request is wrong; the message names the item's index."""

    cause = "bad_input"


class NotSupported(GpuError, TypeError):
    """Raised when a service is asked for something its kind does not do."""

    cause = "bad_input"


class UnknownService(GpuError, LookupError):
    """Raised when no service has that name."""


class NotResident(GpuError, RuntimeError):
    """Raised when work is given to an engine that is not resident."""


class EngineDied(NotResident):
    """Raised when an engine that was resident has failed by itself; a call that may be repeated may be, once it is started again."""


class CallCancelled(GpuError):
    """Raised when a call was stopped before it had its result."""

    cause = "cancelled"


class CallFailed(GpuError, RuntimeError):
    """Raised when an engine could not compute an answer; it stays resident."""


class EngineBusy(GpuError, TimeoutError):
    """Raised when running calls did not end in the time given to an eviction or a stop."""


class EngineFailed(GpuError, RuntimeError):
    """Raised when an engine could not change its state; it is `failed` and may be started again."""


class WrongAnswer(EngineFailed):
    """Raised when an engine does not answer its fixed questions as it did at its start: its weights are spoilt."""


class WrongState(GpuError, RuntimeError):
    """Raised when a change of state is asked for that the life cycle does not have."""


class OverBudget(GpuError, MemoryError):
    """Raised when a service would not fit on a cell: beside the others there, or into the memory that is free of the device."""


class DeviceError(GpuError, ValueError):
    """Raised when devices are asked for that this machine does not have."""


def forget_locals(error: BaseException) -> None:
    """Clear what the frames of an error and of its causes hold, among that weights: it would stay for as long as the error is kept."""
    errors = [error]
    for one in errors:
        clear_frames(one.__traceback__)
        errors += (other for other in (one.__cause__, one.__context__) if other is not None and other not in errors)


def one_line(error: BaseException) -> str:
    """Return what an exception says as one line of bounded length; a foreign one's type comes first."""
    text = " ".join(str(error).split())
    if isinstance(error, TangramError) and text:
        return text[:_LONGEST]
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__
