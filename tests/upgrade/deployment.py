"""A deployment of a release on this machine, whose files can be replaced by those of another one while it runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from app.local.redis_server import RedisServer
from tests.engines.waiting import until
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
UP_S = 120.0
TANGRAM = str(Path(sys.executable).with_name("tangram"))
PROBE = """
import sys
from tangram import Client
with Client(job="upgrade") as client:
    for env in map(client.environment, sys.argv[1:] or [client.open(trajectory="newer").id]):
        env.write_file("probe", b"written")
        assert env.exec("cat ~/probe", session="probe").stdout == "written", env.id
"""


class NotUp(Exception):
    """Raised where a part of the deployment does not come up; the message names it."""


def install(folder: Path, revision: str | None) -> None:
    """Put the files of a revision in the place of what is in `folder`, or those of the working tree."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    listed = "git ls-files -z --cached --others --exclude-standard app migrations scheduler tangram tests workers"
    packed = f"{listed} | tar --create --null --files-from=- --ignore-failed-read" if revision is None else f"git archive '{revision}'"
    subprocess.run(["bash", "-o", "pipefail", "-c", f"{packed} | tar --extract --directory='{folder}'"], cwd=ROOT, check=True)


class Deployment:
    """The processes of a deployment, of the version in `installed`, while its block runs."""

    def __init__(self, folder: Path, database_url: str, revision: str, cores: int) -> None:
        self.folder, self.installed, self.older = folder, folder / "installed", folder / "older"
        store = f"redis+socket://{folder}/redis.sock"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TANGRAM_")}
        own = {"BROKER_URL": store, "RESULT_URL": store, "DATABASE_URL": database_url or f"sqlite:///{folder}/tangram.sqlite"}
        node = {
            "NODE_NAME": "node",
            "CORES": str(cores),
            "MEMORY_MB": "65536",
            "HAND_OVER_S": "1",
            "SANDBOX": "process",
            "DISK_FLOOR_MB": "0",
        }
        self.variables = {**clean, **{f"TANGRAM_{name}": value for name, value in {**own, **node}.items()}, "PYTHONUNBUFFERED": "1"}
        self.port = free_port()
        self._words = {"scheduler": ["scheduler"], "worker": ["worker", "cpu"], "gateway": ["gateway", "--port", str(self.port)]}
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        self._fifos: list[int] = []
        folder.chmod(0o755)  # environments are of other users
        install(self.installed, revision)
        install(self.older, revision)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(RedisServer(self.folder, log=self.folder / "redis.log").stop)
            undo.callback(self._end_all)
            for name in self._words:
                self.start(name)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.close()

    def _end_all(self) -> None:
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGINT)
            try:
                process.wait(UP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for descriptor in self._fifos:
            os.close(descriptor)

    def of(self, tree: Path, state: str) -> dict[str, str]:
        """Return the variables of a process that runs what is in `tree`."""
        return {**self.variables, "PYTHONPATH": str(tree), "TANGRAM_STATE_DIR": str(self.folder / state)}

    def start(self, name: str) -> None:
        """Start a process, and wait until it is up, as its unit of systemd would."""
        variables = self.of(self.installed, name)
        log = (self.folder / f"{name}.log").open("ab")
        if name == "scheduler":
            subprocess.run([TANGRAM, "db", "upgrade"], env=variables, cwd=self.folder, stdout=log, stderr=log, check=True)
        self._processes[name] = subprocess.Popen([TANGRAM, *self._words[name]], env=variables, cwd=self.folder, stdout=log, stderr=log)
        asked = [TANGRAM, "health", "cpu" if name == "worker" else name]

        def is_up() -> bool:
            if self._processes[name].poll() is not None:
                raise NotUp(f"{name} has ended: {(self.folder / f'{name}.log').read_text()[-3000:]}")
            if name != "gateway":
                return not subprocess.run(asked, env=variables, cwd=self.folder, capture_output=True).returncode
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready").close()
            except OSError:
                return False
            return True

        # Each look is a process, which takes as much of the machine as the one that starts.
        try:
            until(is_up, UP_S, longest_pause_s=1.0)
        except AssertionError:
            raise NotUp(f"{name} does not come up: {(self.folder / f'{name}.log').read_text()[-3000:]}") from None

    def end(self, name: str, sent: signal.Signals) -> None:
        """Send a process a signal, and wait for its end."""
        self._processes[name].send_signal(sent)
        self._processes[name].wait(UP_S)

    def client(self, tree: Path, words: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Start a program with the client that is in `tree`."""
        return subprocess.Popen([sys.executable, *words], env=self.of(tree, "trainer"), cwd=self.folder, text=True, **more)

    def probe(self, *environment: str) -> str:
        """Use this tree's client; return what went wrong."""
        process = self.client(ROOT, ["-c", PROBE, *environment], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = process.communicate(timeout=UP_S)[0]
        return said[-300:] if process.returncode else ""

    def ask(self, path: str, body: object, token: str) -> Any:
        """Ask the gateway."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/v1/{path}", json.dumps(body).encode())
        request.add_header("X-API-Key", token)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=UP_S) as answer:
            return json.load(answer)

    def let_go(self, environments: Sequence[str], name: str) -> None:
        """Write lines into a FIFO of environments, for which commands there wait, one line for each."""
        for environment in environments:
            with suppress(FileNotFoundError):  # it is lost
                self._fifos.append(os.open(self._work(environment) / name, os.O_RDWR))
                os.write(self._fifos[-1], b"\n" * 16)

    def marked(self, environment: str, word: str) -> bool:
        """Return whether a command has written its word into the ledger of its environment."""
        marks = self._work(environment) / "marks"
        return marks.exists() and word in marks.read_text().split()

    def _work(self, environment: str) -> Path:
        return self.folder / "worker" / "environments" / "node" / "environments" / environment / "work"
