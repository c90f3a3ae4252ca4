"""Who may call, what a process says of itself, and the commands for it."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import httpx
import pytest

from app.gateway.errors import Unauthorized
from app.gateway.tokens import Tokens, make_token, revoke_tokens
from app.journal.database import open_engine, sqlite_url
from app.journal.migrating import upgrade
from tests.cli.forked import forked
from tests.gateway.conftest import Served
from tests.gateway.shapes import ROCK
from tests.ports import free_port


def tangram(served: Served, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return forked(*words, cwd=served.live.stack.state_dir, **{**served.live.environment, **variables})


async def test_a_process_knows_tokens_that_were_made_and_not_revoked(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "tangram.sqlite")
    upgrade(url)
    engine = open_engine(url)
    token = make_token(engine, "j")
    assert await Tokens(engine).job_of(token) == "j"
    with pytest.raises(Unauthorized):
        await Tokens(engine).job_of(token[:-1])
    # When it is revoked; then a process that has not seen it refuses it, and what was handed out to the job
    assert revoke_tokens(engine, "j") == 1
    for refused in (Tokens(engine).job_of(token), Tokens(engine).check("j")):
        with pytest.raises(Unauthorized):
            await refused
    engine.dispose()


def test_a_token_is_all_that_the_command_prints_and_counts_however_it_is_sent(served: Served) -> None:
    made = tangram(served, "token", "new", "--job", "cli")
    assert (made.returncode, made.stderr) == (0, "")
    token = made.stdout.strip()
    assert made.stdout == token + "\n" and len(token) >= 40
    # Then every way of sending it counts
    basic = base64.b64encode(f"tangram:{token}".encode()).decode()
    for headers in ({"X-API-KEY": token}, {"X-API-Key": token}, {"Authorization": f"Bearer {token}"}, {"Authorization": f"Basic {basic}"}):
        assert httpx.get(f"{served.url}/api/v1/environments", headers=headers).status_code == 200, headers
    # And the database does not hold it
    assert token not in str(served.live.rows("SELECT * FROM gateway_tokens"))
    assert tangram(served, "token", "revoke", "--job", "cli").stdout == "1\n"
    # And a job must have a valid name
    done = tangram(served, "token", "new", "--job", "two\nlines")
    assert done.returncode == 2 and done.stdout == "" and "job" in done.stderr


def test_the_token_of_a_sandbox_counts_until_those_of_its_job_are_revoked(served: Served) -> None:
    with served.http("revoked") as http:
        sandbox = http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 300}).json()
    headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "X-Access-Token": sandbox["envdAccessToken"]}

    port_of_nobody = free_port()

    calls = [
        lambda: httpx.get(f"{served.url}/files", params={"path": "nothing"}, headers=headers),
        lambda: httpx.post(f"{served.url}/filesystem.Filesystem/ListDir", json={"path": "."}, headers=headers),
        lambda: httpx.get(f"{served.url}/api/v1/environments/{sandbox['sandboxID']}/ports/{port_of_nobody}/", headers=headers),
    ]

    def answers(most: int = len(calls)) -> list[int]:
        return [call().status_code for call in calls[:most]]

    assert answers() == [404, 200, 502]
    # Given a command that prints without end
    command = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-c", "while echo more; do sleep 0.1; done"]}}).encode()
    stream = {**headers, "Content-Type": "application/connect+json"}
    body = b"\0" + len(command).to_bytes(4, "big") + command
    with httpx.stream("POST", f"{served.url}/process.Process/Start", headers=stream, content=body, timeout=60) as started:
        parts = started.iter_raw()
        assert b'"start"' in next(parts)
        assert tangram(served, "token", "revoke", "--job", "revoked").stdout == "1\n"
        # When the tokens are revoked; then the stream ends and says why
        assert b'"unauthenticated"' in b"".join(parts)
    served.live.until(lambda: answers(1) == [401])
    served.live.until(lambda: answers() == [401, 401, 401])


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic ?"}])
def test_without_a_token_that_counts_a_call_is_refused_in_the_shapes_own_words(served: Served, headers: dict[str, str]) -> None:
    answer = httpx.get(f"{served.url}/api/v1/environments", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["kind"] == "unauthorized"


LARGE = b"[" + b"[]," * 2_300_000 + b"1]"
"""7 MB that take long to parse."""


@pytest.mark.parametrize("path", ["/api/v1/score", "/run_code", "/classify", "/v2/sandboxes", "/envs/e/execute", f"{ROCK}/execute"])
@pytest.mark.parametrize("length", [f"Content-Length: {len(LARGE)}", "Transfer-Encoding: chunked"])
def test_a_large_body_is_not_read_for_a_caller_without_a_token(served: Served, path: str, length: str) -> None:
    # Given a caller who sends the head of a request, and not its body
    with served.connected() as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: h\r\nX-API-Key: wrong\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.makefile("rb").readline().split()[1] == b"401"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("kind", ["application/connect+json", "application/json"])
def test_a_large_command_of_e2b_is_not_read_for_a_sandbox_that_is_not_there(served: Served, kind: str, chunked: bool) -> None:
    headers = {"E2b-Sandbox-Id": "env-0", "X-Access-Token": "wrong", "Content-Type": kind}
    url, large = f"{served.url}/process.Process/Start", b"\0\x7f" + LARGE
    # A body that makes no sense would be a wrong argument once it were read
    answer = httpx.post(url, content=iter([large]) if chunked else large, headers=headers, timeout=60)
    assert (answer.status_code, answer.json().get("sandboxId")) == (502, "env-0"), answer.text
    # As it is where it is small, and so is read at once
    assert b'"invalid_argument"' in httpx.post(url, content=b"no sense", headers=headers, timeout=60).content


def test_with_a_token_a_large_body_is_served_by_every_way_of_sending_it(served: Served) -> None:
    token = served.token("large")
    for headers in ({"X-API-Key": token}, {"Authorization": f"Bearer {token}"}):
        answer = httpx.post(f"{served.url}/run_code", json={"code": "#" * 100_000, "language": "bash"}, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["status"]) == (200, "Success")
    headers = {"XRL-Authorization": f"Bearer {token}"}
    body = {"sandbox_id": "large", "command": "#" * 100_000}
    answer = httpx.post(f"{served.url}{ROCK}/execute", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200 and answer.json()["result"]["code"] == 4000  # there is no such sandbox


def test_health_readiness_figures_and_routes_need_no_token(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/ready").json() == {"status": "ready"}
    assert httpx.get(f"{served.url}/v1/ping").json() == "pong"
    for path in ("/health", "/ready", "/v1/ping", "/services/judge/health"):
        assert (head := httpx.head(served.url + path)).status_code == 200 and not head.content, path
    assert "tangram_gateway_loop_lag_seconds_count" in httpx.get(f"{served.url}/metrics").text
    assert "/api/v1/environments" in httpx.get(f"{served.url}/openapi.json").json()["paths"]
    # And a path that nobody serves says so
    answer = httpx.get(f"{served.url}/nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["kind"] == "not_found"


@pytest.mark.parametrize("length_is_named", [True, False])
def test_a_body_beyond_the_limit_is_refused(served: Served, http: httpx.Client, environment: str, length_is_named: bool) -> None:
    data = b"x" * (9 * 2**20)
    content = data if length_is_named else iter([data[: 2**20]] * 9)
    answer = http.put(f"{environment}/files", params={"path": "large"}, content=content)
    assert answer.status_code == 413
    assert answer.json()["error"]["kind"] == "too_large" and "TANGRAM_GATEWAY_BODY_MB" in answer.json()["error"]["message"]


def test_the_log_has_one_line_per_call_with_the_ids_of_its_actions(served: Served, http: httpx.Client, environment: str) -> None:
    http.post(f"{environment}/exec", json={"command": "true"})
    # The line is written once the answer is out
    served.live.until(lambda: f"POST {environment}/exec" in served.live.log("gateway"))
    (line,) = [line for line in served.live.log("gateway").splitlines() if f"POST {environment}/exec" in line]
    ((action,),) = served.live.rows(f"SELECT id FROM actions WHERE kind = 'cpu.exec' AND environment = '{environment.rpartition('/')[2]}'")
    assert line.split()[-2:] == ["tests", action] and " 200 " in line


def test_a_port_that_is_taken_is_said_in_one_line(served: Served) -> None:
    done = tangram(served, "gateway", "--port", served.url.rpartition(":")[2])
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("tangram: the port is taken by another program: choose another one, with --port")


def test_a_file_of_languages_that_cannot_be_used_is_said_in_one_line(served: Served, tmp_path: Path) -> None:
    (tmp_path / "languages.toml").write_text("[shout\n")
    done = tangram(served, "gateway", "--port", "0", TANGRAM_GATEWAY_LANGUAGES=str(tmp_path / "languages.toml"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"tangram: {tmp_path / 'languages.toml'} is no TOML")
    assert "Traceback" not in done.stderr
