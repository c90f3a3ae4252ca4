"""What each isolation of process sandboxes holds: programs inside try what they must not be able to do.

`python -m bench.isolation [--user NAME] [-o PAGE]`. Each isolation is tried by a worker of this user and, where that is root, also by
a worker of the user NAME. Probes take for a moment what the kernel counts by user: run them where nothing else matters.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from bench.as_user import last_words, run_module
from workers.cpu.abstract import Environment, EnvironmentSpec, ExecOutcome, ExecRequest
from workers.cpu.process import sandbox as sandbox_module
from workers.cpu.process import seccomp
from workers.cpu.process.isolation import PROCESSES, SHARED_BYTES, Isolation
from workers.cpu.process.namespace import MOST_TERMINALS
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.process.socket_server import PR_SET_NO_NEW_PRIVS, prctl

ISOLATIONS: dict[Isolation, str] = {
    "bubblewrap": "chosen by `auto` where bwrap works",
    "view": "chosen by `auto` where there is no bwrap",
    "none": "chosen by `auto` where namespaces are refused",
}
HEAD = """# Isolation, measured

What each isolation of [process sandboxes](../sandboxes.md#what-is-protected) holds. A program inside tries what it must not be able to do;
a row *holds* where that fails. A column is an isolation and the user of the worker.

<!-- test: not here, because it takes what the kernel counts by user: bench/isolation.py -->
```bash
make isolation      # prints the table; as root it also tries a worker of the user nobody; OUT=docs/reference/isolation.md writes this page
```

"""
MEMORY_MB = 256

FORKS = """
import os, sys, time
count = 0
try:
    while count < int(sys.argv[1]):
        count += 1
        if os.fork() == 0: time.sleep(300)
except OSError: pass
print(count)
"""
"""Starts so many processes at most, and prints how many live then, itself included."""

HOARDS = """
import ctypes, os, sys, time
libc, terminals = ctypes.CDLL(None), 0
while libc.inotify_init1(0) >= 0: pass
try:
    while terminals < int(sys.argv[1]) and os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY): terminals += 1
except OSError: pass
print(terminals, flush=True)
time.sleep(300)
"""
"""Takes all the watches that it is given, and so many terminals at most; prints how many these are, and holds them."""

WATCHES = "import ctypes, sys; sys.exit(ctypes.CDLL(None).inotify_init1(0) < 0)"


def hoarding(most: int) -> str:
    """Return the command that has `hoards.py` hold what it takes, and `taken` say how many terminals."""
    return f"rm -f taken; ulimit -n 4096; python3 hoards.py {most} >taken 2>&1 & until [ -s taken ]; do sleep 0.01; done"


@dataclass(frozen=True, slots=True)
class Place:
    """Two environments of a sandbox, and what programs in the first one are after."""

    env: Environment
    other: Environment
    words: dict[str, object]
    """What stands for names in commands."""

    def run(self, command: str, env: Environment | None = None) -> ExecOutcome:
        """Run a command in an environment, by default the first. What ran there before ends."""
        request = ExecRequest(action_id="probe", command=f"({command.format(**self.words)})", timeout_s=60, fence=True)
        return (env or self.env).start(request).wait()


Probe = str | Callable[[Place], bool]
"""A command that must not succeed, or what returns whether something holds."""


def _watches_are_its_own(place: Place) -> bool:
    place.run(hoarding(0), place.other)
    try:
        return place.run(f"python3 -S -c '{WATCHES}'").exit_code == 0
    finally:
        place.run(":", place.other)


PROBES: dict[str, Probe] = {
    "files of the host that the worker's user alone may read": "cat {folder}/{word}",
    "folders of the system, which are not written to": "test -w /usr",
    "files of another environment": "cat {others}/{word}",
    "temporary files of another environment": "cat {temporary}/{word}",
    "processes of the host are not seen": "grep -q python /proc/{worker}/cmdline",
    "processes of the host are not signalled": "kill -0 {worker}",
    "variables of the worker": "head -c 1 /proc/{worker}/environ | grep -q .",
    "servers of the host": "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 5)'",
    "sockets of the host without a file": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"\\0{word}\")'",
    "capabilities": "grep -qE 'Cap(Prm|Eff|Amb):.*[1-9a-f]' /proc/self/status",
    "setuid programs": "grep -q 'NoNewPrivs:.0' /proc/self/status",
    "new user namespaces": "python3 -c 'import ctypes; exit(ctypes.CDLL(None).unshare(0x10000000) != 0)'",
    "system calls are filtered": "grep -q 'Seccomp:.0' /proc/self/status",
    f"at most {PROCESSES} processes": lambda place: int(place.run(f"python3 -S -c '{FORKS}' {PROCESSES + 50}").stdout) <= PROCESSES,
    "memory is held to `memory_mb`": f"python3 -S -c 'b\"x\" * ({MEMORY_MB} << 21)'",
    f"at most {SHARED_BYTES >> 20} MiB in `/dev/shm`": (
        f"trap 'rm /dev/shm/{{word}}' EXIT; head -c {SHARED_BYTES + 1} /dev/zero >/dev/shm/{{word}} && test -s /dev/shm/{{word}}"
    ),
    f"at most {MOST_TERMINALS} terminals": lambda place: (
        int(place.run(f"{hoarding(MOST_TERMINALS + 1)}; cat taken", place.other).stdout) <= MOST_TERMINALS
    ),
    "inotify instances, where another environment takes all": _watches_are_its_own,
}


def measure(isolation: Isolation, names: Iterable[str] = PROBES) -> dict[str, bool]:
    """Return which probes an isolation holds, with a worker that is this process. Raises `SessionUnavailable` where there is none such."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tangram-isolation-")))
        box = stack.enter_context(closing(ProcessSandbox(folder / "box", isolation=isolation, search_path=os.defpath + ":/usr/local/bin")))
        env, other = (box.open(EnvironmentSpec(id=name, memory_mb=MEMORY_MB)) for name in ("env", "other"))
        server, unix = (stack.enter_context(socket.socket(family)) for family in (socket.AF_INET, socket.AF_UNIX))
        word, temporary = f"tangram-{secrets.token_hex(4)}", tempfile.gettempdir()
        server.bind(("127.0.0.1", 0))
        unix.bind(f"\0{word}")
        server.listen()
        unix.listen()
        (folder / word).touch(0o600)
        reached = {"worker": os.getpid(), "port": server.getsockname()[1]}
        place = Place(env, other, {"folder": folder, "others": other.work_folder, "temporary": temporary, "word": word, **reached})
        other.write_file("hoards.py", HOARDS.encode())
        place.run("touch {word} {temporary}/{word}", other)
        try:
            return {name: probe(place) if callable(probe := PROBES[name]) else place.run(probe).exit_code != 0 for name in names}
        finally:
            place.run("rm {temporary}/{word}", other)


def chosen(isolation: Isolation) -> str:
    """Return what `auto` chooses in the case of `ISOLATIONS`. That of `none` holds this process, from now on, to a filter."""
    if isolation == "none":
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(seccomp.FILTER or b"")
    with tempfile.TemporaryDirectory(prefix="tangram-isolation-") as folder, ExitStack() as stack:
        if isolation == "view":
            stack.enter_context(patch.object(sandbox_module, "find_bubblewrap", return_value=None))
        return stack.enter_context(closing(ProcessSandbox(Path(folder) / "box"))).isolation


def table(columns: dict[str, dict[str, bool]]) -> str:
    """Return what was measured, by isolation and user, as a table of Markdown."""
    says = {True: "holds", False: "does not hold", None: ""}
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(says[column.get(name)] for column in columns.values())] for name in (*ISOLATIONS.values(), *PROBES)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(columns: dict[str, dict[str, bool]]) -> str:
    """Return the page `docs/reference/isolation.md`."""
    kernel = ".".join(os.uname().release.split(".")[:2])
    version = subprocess.run([shutil.which("bwrap") or "bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{HEAD}Linux {kernel}, {version}:\n\n{table(columns)}\n"


def main() -> int:
    """Measure, print, and return 0 where all isolations could be tried."""
    parser = argparse.ArgumentParser(prog="python -m bench.isolation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--user", default="nobody", help="who the ordinary worker is, where this one is root")
    parser.add_argument("-o", "--out", type=Path, help="write the page docs/reference/isolation.md there")
    parser.add_argument("--only", choices=ISOLATIONS, help="try one isolation, as this user, and print what it holds as JSON")
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps({**measure(options.only), ISOLATIONS[options.only]: chosen(options.only) == options.only}))
        return 0
    columns, problems = {}, []
    for isolation in ISOLATIONS:
        for user in dict.fromkeys((pwd.getpwuid(os.geteuid()).pw_name, *([options.user] if os.geteuid() == 0 else []))):
            done = run_module("bench.isolation", "--only", isolation, user=user)
            if done.returncode:
                problems.append(f"{isolation}, worker of {user}: {last_words(done)}")
            else:
                columns[f"`{isolation}`, {user}"] = json.loads(done.stdout)
    print("\n".join([table(columns), *problems]))
    if options.out and not problems:
        options.out.write_text(page(columns), encoding="utf-8")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
