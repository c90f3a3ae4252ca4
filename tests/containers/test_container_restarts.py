"""A stack whose sandboxes are containers, and whose CPU worker is killed: its environments go on in the next one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.support import started
from tests.cli.test_cli_restarts import RESULT_S, Up
from tests.freezing import freeze
from tests.live.support import SERVICES
from tests.workers_cpu.support import until

from .support import alone_as, containers, engine

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NODE = "cpu-0"
WAITS = "until test -e {}; do sleep 0.05; done; echo once >>marks; cat marks"


def home() -> Path:
    (container,) = containers(NODE)
    return Path(f"/proc/{engine().inspect_container(container)['State']['Pid']}/root/home/user")


def test_commands_and_results_that_wait_for_the_store_outlive_their_worker(image: str, tmp_path: Path) -> None:
    (tmp_path / "services.toml").write_text(SERVICES)
    variables = {"TANGRAM_SANDBOX": "docker", "TANGRAM_IMAGE": image, "TANGRAM_IMAGE_PULL": "never", "TANGRAM_HAND_OVER_S": "1"}
    with alone_as(NODE), started(tmp_path, "up", "--cores", "2", **variables) as process:
        up = Up(tmp_path, process)
        assert up.said().startswith("the stack is up")
        with up.client() as client, client.open(trajectory="t", queue_timeout_s=RESULT_S) as env:
            env.exec("kept=1")
            # Given a command that ends while Redis is away, and one that runs; when their worker is killed before Redis is back
            ends, runs = (env.submit(f"touch {name}; {WAITS.format(f'{name}.go')}", session=name) for name in ("ends", "runs"))
            assert until(lambda: all((home() / name).exists() for name in ("ends", "runs")))
            freeze(process.pid)
            log = up.state / "logs" / f"{NODE}.log"
            before, logged = {"redis": up.kill("redis")}, log.stat().st_size
            (home() / "ends.go").touch()
            assert until((home() / "marks").exists)
            assert until(lambda: b"reports cannot be sent yet" in log.read_bytes()[logged:])
            before[NODE] = up.kill(NODE)
            process.send_signal(signal.SIGCONT)
            for name, pid in before.items():
                up.until_restarted(name, pid)
            # Then the first has its result, the second ends as it would have, and each has run once
            assert ends.result(RESULT_S).stdout == "once\n"
            (home() / "runs.go").touch()
            assert runs.result(RESULT_S).stdout == "once\nonce\n"
            # And so it is where the worker is replaced
            last = env.submit(f"touch last; {WAITS.format('last.go')}", session="last")
            assert until(lambda: (home() / "last").exists())
            replaced = up.terminate(NODE)
            up.until_restarted(NODE, replaced)
            (home() / "last.go").touch()
            assert last.result(RESULT_S).stdout == "once\nonce\nonce\n"
            assert env.exec("echo $kept").stdout == "1\n"
        assert until(lambda: not containers(NODE))
