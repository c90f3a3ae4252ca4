"""Whose fault it is when a file of an environment cannot be served."""

from __future__ import annotations

import errno
import os

import pytest

from workers.cpu.errors import (
    FileUnusable,
)
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.rooted_files import HomeFiles


@pytest.mark.parametrize(
    ("number", "cause", "fault"),
    [
        (errno.ENOSPC, "sandbox_failed", "infrastructure"),
        (errno.EIO, "sandbox_failed", "infrastructure"),
        (errno.EACCES, "bad_input", "caller"),
    ],
)
def test_a_file_that_the_node_cannot_serve_is_not_the_callers_fault(
    env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch, number: int, cause: str, fault: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(HomeFiles, "open_to_write", fail)
    with pytest.raises(FileUnusable, match=os.strerror(number)) as caught:
        env.write_file("a", b"text")
    assert (caught.value.cause, caught.value.fault) == (cause, fault)
