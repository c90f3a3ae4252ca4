"""The way of docs/deployment.md without containers, over several hosts: Redis and PostgreSQL with TLS, two schedulers, workers.

A `Service` stands for a unit of systemd. It is started again a second after it ended, unless it is kept away.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from app.local.processes import wait_until
from tangram import Settings
from tests.certificates import make_certificates
from tests.freezing import freeze
from tests.hosts.network import HUB, ROOT, Network

UP_S = 120.0
RESTART_S = 1.0
NODES = ("node-1", "node-2")
_TANGRAM = (str(Path(sys.executable).with_name("tangram")),)


class NotThere(Exception):
    """Raised where a program is missing or a service does not come up; the message names it."""


class Service:
    """A process on a host that is started again when it ends."""

    def __init__(self, network: Network, host: str, argv: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._log: IO[bytes] = log.open("ab")
        self._begin = partial(network.start, host, argv, variables, self._log)
        self._away, self._over = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        self.process = self._begin()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._over.is_set():
            self.process.wait()
            self._over.wait(RESTART_S)
            with self._changed:
                self._changed.wait_for(lambda: not self._away.is_set() or self._over.is_set())
                if not self._over.is_set():
                    self.process = self._begin()

    def end(self, sent: signal.Signals) -> None:
        self.process.send_signal(sent)

    def take_away(self) -> None:
        """Kill the process; it is started again once it is to come back."""
        self._away.set()
        self.process.kill()
        self.process.wait()

    def bring_back(self) -> None:
        with self._changed:
            self._away.clear()
            self._changed.notify_all()

    def freeze(self) -> None:
        freeze(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self, sent: signal.Signals) -> None:
        self._over.set()
        self.bring_back()
        self.process.send_signal(sent)
        try:
            self.process.wait(UP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._keeper.join()
        self._log.close()


class Deployment:
    """All services, up, while its block runs. `variables` are settings of every one of them."""

    def __init__(self, network: Network, folder: Path, variables: Mapping[str, str], cores: int) -> None:
        self.network, self.folder = network, folder
        self.services: dict[str, Service] = {}
        self._cores = cores
        self._more = dict(variables)
        self._password = secrets.token_hex(12)
        self._ca = folder / "ca.pem"
        login, asked = f":{self._password}@{HUB}", f"ssl_cert_reqs=required&ssl_ca_certs={self._ca}"
        self.redis_url = f"rediss://{login}:6380/0?{asked}"
        self.database_url = f"postgresql+psycopg://tangram:{self._password}@{HUB}:5433/tangram?sslmode=verify-full&sslrootcert={self._ca}"

    def __enter__(self) -> Self:
        try:
            if shutil.which("openssl") is None:
                raise NotThere("there is no `openssl`")
            make_certificates(self.folder, HUB)
            self._start_redis()
            self._start_postgres()
            hub = {"TANGRAM_DATABASE_URL": self.database_url}
            subprocess.run(self.network.on("hub", [*_TANGRAM, "db", "upgrade"]), env=self._variables("hub", hub), check=True, cwd=ROOT)
            for number in (1, 2):
                self._start("hub", f"scheduler-{number}", [*_TANGRAM, "scheduler"], hub)
            for node in NODES:
                of_node = {"TANGRAM_NODE_NAME": node, "TANGRAM_CORES": str(self._cores), "TANGRAM_MEMORY_MB": "65536"}
                self._start(node, node, [*_TANGRAM, "worker", "cpu"], of_node)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # What a fault still holds up would not end. Workers close their environments at an interrupt.
        for host in self.network.hosts:
            self.network.calm(host)
        for service in self.services.values():
            service.bring_back()
            service.thaw()
        order = sorted(self.services, key=lambda name: ("node" not in name, "scheduler" not in name))
        for name in order:
            self.services[name].stop(signal.SIGINT)

    def settings(self) -> Settings:
        """Return what a trainer has to know. It waits for a lost stack for a minute."""
        return Settings(broker_url=self.redis_url, result_url=self.redis_url, state_dir=self.folder / "trainer", connect_timeout_s=60.0)

    def tell_redis(self, words: Sequence[str]) -> None:
        """Tell Redis a command, on the hub."""
        program = [str(shutil.which("redis-cli")), "-h", HUB, "-p", "6380", "--tls", "--cacert", str(self._ca), "--no-auth-warning"]
        told = self.network.on("hub", [*program, "-a", self._password, *words])
        subprocess.run(told, check=True, capture_output=True)

    def _variables(self, name: str, more: Mapping[str, str]) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("TANGRAM_")}
        own = {"TANGRAM_BROKER_URL": self.redis_url, "TANGRAM_RESULT_URL": self.redis_url, "TANGRAM_STATE_DIR": str(self.folder / name)}
        return {**clean, **own, **self._more, **more, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def _start(self, host: str, name: str, argv: Sequence[str], more: Mapping[str, str]) -> None:
        self.services[name] = Service(self.network, host, argv, self._variables(name, more), self.folder / f"{name}.log")

    def _start_redis(self) -> None:
        if (program := shutil.which("redis-server")) is None:
            raise NotThere("there is no `redis-server` with TLS")
        (data := self.folder / "redis").mkdir()
        files = {"cert-file": "hub.pem", "key-file": "hub.key", "ca-cert-file": "ca.pem"}
        tls = [word for name, file in files.items() for word in (f"--tls-{name}", str(self.folder / file))]
        own = f"--port 0 --tls-port 6380 --tls-auth-clients no --bind {HUB} --requirepass {self._password} --appendonly yes".split()
        self._start("hub", "redis", [program, *own, *tls, "--dir", str(data)], {})

    def _start_postgres(self) -> None:
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not programs:
            raise NotThere("there is no PostgreSQL in /usr/lib/postgresql")
        (data := self.folder / "postgres").mkdir()
        for name in ("hub.pem", "hub.key"):
            shutil.copy(self.folder / name, data / name)
        (data / "password").write_text(self._password)
        for path in [data, *data.iterdir()]:
            shutil.chown(path, "postgres", "postgres")
            path.chmod(0o700 if path.is_dir() else 0o600)
        self.folder.chmod(0o755)
        own = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]
        made = f"{programs[-1]}/initdb -D {data}/data -U tangram --pwfile={data}/password -A scram-sha-256".split()
        subprocess.run([*own, *made], check=True, capture_output=True, cwd="/")
        options = {
            "listen_addresses": HUB,
            "port": "5433",
            "unix_socket_directories": "",
            "ssl": "on",
            "ssl_cert_file": str(data / "hub.pem"),
            "ssl_key_file": str(data / "hub.key"),
        }
        with (data / "data" / "pg_hba.conf").open("a") as rules:
            rules.write("hostssl all all 10.78.0.0/16 scram-sha-256\n")
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        self._start("hub", "postgres", [*own, str(programs[-1] / "postgres"), "-D", str(data / "data"), *words], {})
        create = [str(programs[-1] / "psql"), f"host={HUB} port=5433 user=tangram dbname=postgres", "-c", "create database tangram"]
        asked = {**os.environ, "PGPASSWORD": self._password}

        def created() -> bool:
            return not subprocess.run(self.network.on("hub", create), env=asked, capture_output=True).returncode

        if not wait_until(created, UP_S):
            raise NotThere("PostgreSQL does not come up")
