"""Whatever commands do and wherever they are sent: the processes of one are where its last grant says, and none stays behind.

Two environments each have a puppet, a command that starts processes as a test says. After each step every living process is
looked up in the process table.
"""

from __future__ import annotations

import os
import select
import threading
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.cpu.abstract import EnvironmentSpec, ExecOutcome, ExecRequest, Execution, Holding
from workers.cpu.process import tree
from workers.cpu.process.sandbox import ProcessSandbox

from .support import in_background, processes_with, until
from .test_background import BACK, HERE

SLEEP = "sleep 309.5 >/dev/null 2>&1"
THREADS = "import threading, time\nfor _ in range(3): threading.Thread(target=time.sleep, args=(309.5,)).start()\nopen('threads', 'w')"
PUPPET = f"""
[ -p asked ] || mkfifo asked did
exec 3<>asked 4<>did
echo ready >&4
while read -r what <&3; do
  case $what in
    fork) {SLEEP} & ;;
    setsid) setsid {SLEEP} & ;;
    orphan) (setsid sh -c '{SLEEP} & {SLEEP} & wait' >/dev/null 2>&1 &) ;;
    thread) python3 -S -c "{THREADS}" >/dev/null 2>&1 & until [ -e threads ]; do sleep 0.01; done; rm threads ;;
    end) break ;;
  esac
  echo did >&4
done 3<>asked
exec 3>&- 4>&-
"""
WHATS = ("fork", "setsid", "setsid", "orphan", "orphan", "thread", "core", "core", "back", "back", "end", "kill")
STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(WHATS)), max_size=10)
numbers = count()


class Puppet:
    """An environment, its command while there is one, and where that was sent last."""

    def __init__(self, box: ProcessSandbox) -> None:
        self.means = box.background
        self.env = box.open(EnvironmentSpec(id=f"e{next(numbers)}"))
        self.execution: Execution | None = None
        self.holding = Holding()
        self.outcomes: list[ExecOutcome] = []
        self.thread: threading.Thread | None = None

    def step(self, what: str) -> None:
        """Do what is asked; where no command runs, one is started first."""
        holding = BACK if what == "back" else Holding((HERE[0],))
        if self.execution is None:
            self.start(holding)
        if what in ("core", "back"):
            self.holding = holding
            assert self.execution is not None
            self.execution.resize(holding)
        elif what == "kill":
            assert self.execution is not None
            self.execution.kill("asked to")
            self.over("cancelled")
        else:
            self.tell(what)
            if what == "end":
                self.over("succeeded")

    def start(self, holding: Holding) -> None:
        """Start a command there."""
        self.holding = holding
        self.execution = execution = self.env.start(ExecRequest(action_id="a", command=PUPPET, holding=holding, timeout_s=120.0))
        self.outcomes = []
        self.thread = thread = threading.Thread(target=lambda: self.outcomes.append(execution.wait()))
        thread.start()
        assert until((self.env.work_folder / "did").exists)
        self.heard()

    def tell(self, what: str) -> None:
        """Have the command do something, and wait until it has."""
        descriptor = os.open(self.env.work_folder / "asked", os.O_RDWR)
        os.write(descriptor, f"{what}\n".encode())
        if what != "end":
            self.heard()
        else:
            self.join()
        os.close(descriptor)

    def heard(self) -> None:
        """Take one answer."""
        descriptor = os.open(self.env.work_folder / "did", os.O_RDWR | os.O_NONBLOCK)
        try:
            said = b""
            while not said.endswith(b"\n"):
                assert select.select([descriptor], [], [], 60)[0], "the command does not answer"
                said += os.read(descriptor, 1)
        finally:
            os.close(descriptor)

    def over(self, status: str) -> None:
        """Wait for the end of the command."""
        self.join()
        assert [outcome.status for outcome in self.outcomes] == [status], self.outcomes
        self.execution = None

    def join(self) -> None:
        """Wait for the thread of the last command."""
        if self.thread is not None:
            self.thread.join(60)

    def misplaced(self) -> list[str]:
        """Return what is not where it should be: the command's processes, or else what commands have left running."""
        found = [process for pid in processes_with(str(self.env.work_folder)) if (process := tree.read_process(pid)) is not None]
        if self.execution is None:
            # A shell has nothing above it but the supervisor, and is no part of what was left.
            left = [process for process in found if not _is_shell(process.pid)]
            return [f"{process}: in the foreground" for process in left if not self._is_in_background(process.pid)]
        if self.holding.background:
            return [f"{process}: in the foreground" for process in found if not self._is_in_background(process.pid)]
        return [f"{process}: not on its core" for process in found if not self._is_on_core(process.pid)]

    def _is_in_background(self, pid: int) -> bool:
        wanted = set(HERE[-1:] if self.means == "affinity" else HERE)
        try:
            return in_background(pid, self.means) and all(os.sched_getaffinity(thread) == wanted for thread in tree.threads(pid))
        except (OSError, IndexError):
            return tree.read_process(pid) is None

    def _is_on_core(self, pid: int) -> bool:
        try:
            masks = [os.sched_getaffinity(thread) for thread in tree.threads(pid)]
            return masks == [{HERE[0]}] * len(masks) and not in_background(pid, self.means)
        except (OSError, IndexError):
            return tree.read_process(pid) is None

    def close(self) -> None:
        """Close the environment; nothing of it is left."""
        self.env.close()
        self.join()
        assert not processes_with(str(self.env.work_folder))


def _is_shell(pid: int) -> bool:
    try:
        return b"/control/" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.alone  # A command in the background does nothing where other tests use all cores.
@given(steps=STEPS)
@settings(max_examples=6)
def test_every_process_is_where_the_last_grant_says(box: ProcessSandbox, steps: list[tuple[str, str]]) -> None:
    if len(HERE) < 2:
        pytest.skip("the first core and the last one are the same")
    # Given two environments; when their commands start processes, are sent to and fro, end and are ended
    puppets = {name: Puppet(box) for name in "ab"}
    try:
        for name, what in steps:
            puppets[name].step(what)
            # Then each process is where it should be; one that was just starting, or has left its autogroup, once it was looked for
            for puppet in puppets.values():
                assert until(lambda puppet=puppet: not puppet.misplaced()), puppet.misplaced()  # type: ignore[misc]
    finally:
        for puppet in puppets.values():
            puppet.close()
