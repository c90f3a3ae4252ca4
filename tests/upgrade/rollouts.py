"""The trainer of an upgrade: a program of its own, run on the client of either version, `python rollouts.py ENVIRONMENTS`.

It opens environments, has commands run in them, and says so by a line of JSON. Then each line of its standard input names what is next.
The commands wait for lines of FIFOs, which the check writes, and write a ledger, the file `marks` in the folder of their environment.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from tangram import Client, TangramError

WAIT_S = 240.0
WAITS = "read _ <~/{0}; echo {0} >> ~/marks; "
LARGE = "seq 1 150000; read _ <~/after; seq 150000 300000"


@dataclass
class Rows:
    """How often each thing was right, and what was seen where it was not."""

    right: Counter[str] = field(default_factory=Counter)
    of: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, list[Any]]:
        """Return for each name how often it was right, how often it was looked at, and what was wrong."""
        return {name: [self.right[name], self.of[name], self.wrong.get(name, [])] for name in self.of}

    def check(self, name: str, look: Callable[[], object], expected: object) -> None:
        """Count whether what is seen is what was expected."""
        try:
            seen = look()
        except TangramError as error:
            seen = f"{type(error).__name__}: {error}"
        self.of[name] += 1
        self.right[name] += seen == expected
        if seen != expected:
            self.wrong.setdefault(name, []).append(f"{str(seen)[:300]} instead of {str(expected)[:80]}")


class Rollout:
    """One environment and the commands in it."""

    def __init__(self, client: Client, number: int) -> None:
        self.number, self.seen = number, bytearray()
        self.env = client.open(trajectory=f"upgrade {number}", queue_timeout_s=WAIT_S)
        begun = f"kept={number}; export SET={number}; mkfifo ~/during ~/after; mkdir ~/sub; cd ~/sub; sleep 10000 & echo $! > ~/server"
        self.env.exec(begun)
        self.handles: dict[str, Any] = {word: self._submit(word, WAITS.format(word) + f"echo {number}") for word in ("during", "after")}
        # It waits in the scheduler for the command before it in its session.
        self.handles["parked"] = self._submit("after", f"echo parked >> ~/marks; echo {number}")
        # Its text goes beside the message, as a blob.
        self.handles["long text"] = self._submit("long", WAITS.format("after") + f"echo {number} # {'x' * 50_000}")
        self.large = self._submit("large", LARGE)
        self.streamed = self._submit("streamed", f"echo begun; {WAITS.format('after')} echo {number}", stream=True)
        self.input = self._submit("input", "read word; echo $word", stdin=True)
        self.reader = Thread(target=self._read, daemon=True)
        self.reader.start()

    def _submit(self, session: str, command: str, **more: Any) -> Any:
        return self.env.submit(command, session=session, queue_timeout_s=WAIT_S, **more)

    def _read(self) -> None:
        try:
            for chunk in self.streamed.output():
                self.seen += chunk.data
        except TangramError as error:
            self.seen += str(error).encode()

    def _end_of_input(self) -> object:
        try:
            return self.input.result(WAIT_S).stdout
        except TangramError as error:
            return type(error).__name__

    def while_away(self) -> None:
        """Ask for one more command."""
        self.handles["asked for meanwhile"] = self._submit("main", f"echo meanwhile >> ~/marks; echo {self.number}")

    def check(self, rows: Rows) -> None:
        """Look at what has become of all that, and close the environment."""
        env, own = self.env, f"{self.number}\n"
        for name, handle in self.handles.items():
            rows.check(f"result: {name}", lambda handle=handle: handle.result(WAIT_S).stdout, own)  # type: ignore[misc]
        rows.check("result: streamed", lambda: self.streamed.result(WAIT_S).stdout, f"begun\n{own}")
        self.reader.join(30)
        rows.check("stream", self.seen.decode, f"begun\n{own}")
        rows.check("a command with an input is lost", self._end_of_input, "ActionLost")
        rows.check("result: large", lambda: self.large.result(WAIT_S).stdout == env.exec(LARGE, session="again").stdout, True)
        state = "pwd | grep -o sub; kill -0 $(cat ~/server) && echo $kept $SET"
        rows.check("sessions", lambda: env.exec(state, queue_timeout_s=WAIT_S).stdout, f"sub\n{self.number} {self.number}\n")
        once = "after after after during meanwhile parked"
        rows.check("each command once", lambda: " ".join(sorted(env.read_file("marks").decode().split())), once)
        rows.check("closes", env.close, None)


def main() -> None:
    """Do as the lines of standard input say."""
    rows = Rows()
    with Client(job="upgrade") as client, ThreadPoolExecutor(count := int(sys.argv[1])) as threads:
        rollouts = list(threads.map(lambda number: Rollout(client, number), range(count)))
        print(json.dumps([rollout.env.id for rollout in rollouts]), flush=True)
        for line in sys.stdin:
            if line.strip() == "away":
                for rollout in rollouts:
                    rollout.while_away()
            else:
                list(threads.map(lambda rollout: rollout.check(rows), rollouts))
                break
            print("{}", flush=True)
    print(json.dumps(rows.as_json()))


if __name__ == "__main__":
    main()
