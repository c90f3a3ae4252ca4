"""A look at a running deployment from a trainer's side: `make smoke`, or `python -m app.smoke`.

One line for each check, the first that fails ends it with exit code 1. Where the deployment is the settings say, as for
every trainer; without addresses it is the embedded stack of the state folder. What it opens it closes, and an alarm ends
it within `LIMIT_S` whatever hangs.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from app.scheduler_document import SHOWN_TTL_S, read_shown
from tangram import Client
from tangram.client import Environment
from tangram.connection import find_addresses, open_store
from tangram.errors import ActionCancelled, ActionFailed, TangramError
from tangram.settings import Settings

LIMIT_S = 55
STEP_S = 20.0
CANCEL_S = 10.0
PAUSE_S = 0.05
FILE = "smoke.bin"
STARTED = "started"


class SmokeFailed(Exception):
    """Raised when a check did not see what it should have; the message says what it saw."""


Check = tuple[str, Callable[[], str]]
"""What is checked, and what does so and returns what it saw."""


@dataclass
class Smoke:
    """The checks, in order; `image` is that of the environment, None for the worker's default."""

    settings: Settings
    image: str | None = None

    def __post_init__(self) -> None:
        self._client: Client | None = None
        self._opened: Environment | None = None
        self._word = secrets.token_hex(8)

    def checks(self) -> Iterator[Check]:
        """Yield the checks; each needs those before it."""
        yield "broker and result store", self._connect
        yield "scheduler", self._scheduler
        yield "open an environment", self._open
        yield "run a command", self._run
        yield "write and read a file", self._files
        yield "cancel a command", self._cancel
        yield "go on after a cancel", self._go_on
        yield "close the environment", self._close

    def leave(self) -> None:
        """Close what is open, whatever has failed."""
        if self._client is not None:
            self._client.close()

    @property
    def _env(self) -> Environment:
        assert self._opened is not None, "the checks run in order"
        return self._opened

    def _connect(self) -> str:
        self._client = Client(job="smoke", settings=self.settings)
        return "both answer"

    def _scheduler(self) -> str:
        store = open_store(find_addresses(self.settings).result_url, self.settings.connect_timeout_s)
        shown = read_shown(store, self.settings.shards)
        if shown is None or shown["shown_ago_s"] >= SHOWN_TTL_S:
            raise SmokeFailed(
                "no scheduler shows itself" if shown is None else f"the scheduler of shard {shown['shard']} does not show itself"
            )
        return "shows itself"

    def _open(self) -> str:
        assert self._client is not None, "the checks run in order"
        # With a limit on the wait: where there is no CPU worker, nobody would ever say so.
        trajectory = f"smoke-{self._word}"
        self._opened = self._client.open(trajectory=trajectory, image=self.image, queue_timeout_s=STEP_S, timeout_s=STEP_S)
        return self._opened.id

    def _run(self) -> str:
        done = self._env.submit(f"echo {self._word}").result(STEP_S)
        if done.exit_code != 0 or done.stdout != f"{self._word}\n":
            raise SmokeFailed(f"exit code {done.exit_code}, output {done.stdout!r}, errors {done.stderr!r}")
        act = done.act
        parts = {"queue": act.queue_s, "background": act.background_s, "overhead": act.overhead_s, "execution": act.execution_s}
        return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())

    def _files(self) -> str:
        data = self._word.encode() + bytes(range(256)) * 16
        self._env.write_file(FILE, data)
        if (back := self._env.read_file(FILE)) != data:
            raise SmokeFailed(f"{len(data)} bytes were written and {len(back)} others read")
        size = self._env.submit(f"wc -c <{FILE}").result(STEP_S).stdout.strip()
        if size != str(len(data)):
            raise SmokeFailed(f"a command sees {size!r} bytes instead of {len(data)}")
        return f"{len(data)} bytes"

    def _cancel(self) -> str:
        handle = self._env.submit(f"echo {self._word} >{STARTED}; exec sleep 600", timeout_s=60)
        self._await_started()
        began = time.monotonic()
        handle.cancel()
        try:
            handle.result(CANCEL_S)
        except ActionCancelled:
            return f"after {time.monotonic() - began:.3f} s"
        raise SmokeFailed("it ended by itself instead")

    def _await_started(self) -> None:
        """Return once the command runs."""
        deadline = time.monotonic() + STEP_S
        while time.monotonic() < deadline:
            try:
                if self._env.read_file(STARTED).strip() == self._word.encode():
                    return
            except ActionFailed:
                pass  # it has not made the file yet
            time.sleep(PAUSE_S)
        raise SmokeFailed(f"the command to be cancelled did not start within {STEP_S:g} s")

    def _go_on(self) -> str:
        done = self._env.submit(f"cat {STARTED}").result(STEP_S)
        if done.stdout.strip() != self._word:
            raise SmokeFailed(f"output {done.stdout!r}, errors {done.stderr!r}")
        return "the files are still there"

    def _close(self) -> str:
        self._env.close()
        return "closed"


def run(smoke: Smoke, say: Callable[[str], None]) -> bool:
    """Run the checks in order up to the first that fails, and say a line for each; return whether none has."""
    try:
        for name, check in smoke.checks():
            try:
                say(f"ok    {name}: {check()}")
            except (SmokeFailed, TangramError, TimeoutError) as error:
                say(f"FAIL  {name}: {' '.join(str(error).split())}")
                return False
    finally:
        smoke.leave()
    return True


def _on_alarm(number: int, frame: FrameType | None) -> None:
    signal.alarm(5)  # for whatever hangs while things are closed
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise SmokeFailed(f"no answer, {LIMIT_S} s after the first check began")


def main() -> None:
    """Run the checks against the deployment that the settings name."""
    parser = argparse.ArgumentParser(prog="python -m app.smoke", description="Check a running deployment from a trainer's side.")
    parser.add_argument("--image", help="image of the environment; by default that of the worker")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.alarm(LIMIT_S)
    passed = run(Smoke(Settings(), options.image), lambda line: print(line, flush=True))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
