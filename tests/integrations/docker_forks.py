"""`tangram-docker` in forks of one process that has imported it, and has neither threads nor connections: a tenth of a fresh one's time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from tangram.integrations import docker_cli
from tests.exit_codes import exit_code_of

ROOT = Path(__file__).resolve().parents[2]


class Forks:
    """Runs `tangram-docker` in the environment variables that it is given. The process that forks is started with the first command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command; return what `subprocess.run` would."""
        if self._process is None:
            words = [sys.executable, "-m", "tests.integrations.docker_forks"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(words, cwd=ROOT, text=True, start_new_session=True, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            asked = {"arguments": arguments, "variables": dict(variables), "out": out.name, "err": err.name}
            try:
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
                code = int(self._process.stdout.readline())
            except BaseException:  # the test's time is over, or the process has ended; the next command gets another one
                os.killpg(self._process.pid, signal.SIGKILL)
                self.close()
                raise
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


@contextmanager
def forks() -> Iterator[Forks]:
    """Run commands in forks; end the process that forks afterwards."""
    with closing(Forks()) as running:
        yield running


def serve(lines: IO[str]) -> None:
    """Run what each line asks for in a fork, and print its exit code."""
    for line in lines:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(**asked)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(arguments: list[str], variables: dict[str, str], out: str, err: str) -> None:
    code = 70
    try:
        os.environ.clear()
        os.environ.update(variables)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY), number)
        sys.argv = ["tangram-docker", *arguments]
        code = exit_code_of(docker_cli.main)
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(sys.stdin)
