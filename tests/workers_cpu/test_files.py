"""Whose fault it is when a file of an environment cannot be served."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from workers.cpu.errors import FilesUnreachable, FileUnusable
from workers.cpu.files import RegularFiles, root_of
from workers.cpu.process.environment import ProcessEnvironment


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

    monkeypatch.setattr(RegularFiles, "open_to_write", fail)
    with pytest.raises(FileUnusable, match=os.strerror(number)) as caught:
        env.write_file("a", b"text")
    assert (caught.value.cause, caught.value.fault) == (cause, fault)


def test_files_are_not_served_from_a_process_whose_environment_has_just_ended() -> None:
    # Given an id that was read before the environment has ended, and is another process's now
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FilesUnreachable, match="its processes have just ended"), root_of(os.getpid(), lambda: True):
        pytest.fail("a folder of another process is given")
    assert os.listdir("/proc/self/fd") == before


def test_a_terminal_that_is_taken_for_a_file_cannot_signal_the_worker() -> None:
    script = (
        "import os\nfrom workers.cpu.errors import FileUnusable\nfrom workers.cpu.files import HostFiles\n"
        "terminal = os.ttyname(os.openpty()[1])\n"
        "for call in (lambda f: f.read(terminal), lambda f: f.write(terminal, b'', None)):\n"
        "    try: call(HostFiles(100, '/'))\n    except FileUnusable: print('refused')\n"
        "print(open('/proc/self/stat').read().split()[6])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True, timeout=60, check=True)
    assert done.stdout == "refused\nrefused\n0\n"
