"""No path of a process environment leads out of its root, and whose fault it is when a file cannot be served."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import TangramError
from workers.cpu.errors import (
    FileUnusable,
)
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.files import Files


@given(parts=st.lists(st.sampled_from(["..", ".", "a", "b", "link", "up", "", "/", "~"]), min_size=1, max_size=8))
def test_no_path_ever_writes_outside(parts: list[str]) -> None:
    # Given a root with links that lead out and up, and any path
    with tempfile.TemporaryDirectory() as folder:
        outside, root = Path(folder, "outside"), Path(folder, "root")
        for made in (outside, root / "work" / "a"):
            made.mkdir(parents=True)
        os.symlink(outside, root / "work" / "link")
        os.symlink("../..", root / "work" / "up")
        # When it is written, or refused
        with contextlib.suppress(TangramError):
            Files(root, root / "work", 100).write("/".join(parts), b"x", None)
        # Then nothing outside the root has changed
        assert sorted(os.listdir(folder)) == ["outside", "root"]
        assert os.listdir(outside) == []


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

    monkeypatch.setattr(Files, "open_to_write", fail)
    with pytest.raises(FileUnusable, match=os.strerror(number)) as caught:
        env.write_file("a", b"text")
    assert (caught.value.cause, caught.value.fault) == (cause, fault)
