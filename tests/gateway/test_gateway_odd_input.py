"""What callers get wrong is refused in their shape's own words, and never counted as a failure of the system."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
from collections.abc import Iterator

import httpx
import pytest

from tests.gateway.conftest import Served
from tests.gateway.shapes import ROCK

pytestmark = pytest.mark.real

HUGE = "1" + "0" * 400
HALF = '"\\ud800"'
"""Half of a surrogate pair in JSON, as models write it."""


@pytest.fixture(scope="module")
def odd(served: Served) -> Iterator[httpx.Client]:
    """Return a caller that has the sandboxes `odd` of SWE-ReX, with a shell, and `odd-rock` of ROCK."""
    with served.http("odd") as http:
        assert http.post("/envs/odd/create_session", json={"startup_timeout": 60}).status_code == 200
        body = {"image": "i", "memory": "64m", "sandbox_id": "odd-rock", "auto_clear_time_minutes": 60}
        assert http.post(f"{ROCK}/start_async", json=body).json()["status"] == "Success"
        yield http
        http.post("/envs/odd/close")
        http.post(f"{ROCK}/stop", json={"sandbox_id": "odd-rock"})


@pytest.fixture(autouse=True)
def no_failure_of_ours(served: Served) -> Iterator[None]:
    """Check that nothing of it counts as a failure of the system."""
    before = served.infra_failed()
    yield
    assert served.infra_failed() == before


def refused(http: httpx.Client, path: str, body: str) -> bool:
    """Send a body as it is, and say whether it was refused as its caller's fault."""
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    if path.startswith(ROCK):
        return answer.status_code == 200 and answer.json()["result"]["code"] == 4000
    return answer.status_code in (400, 422)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e308", "1e12", HUGE, "0", "-1"])
def test_a_time_that_cannot_be_is_refused_in_every_shape(odd: httpx.Client, number: str) -> None:
    bodies = [
        ("/api/v1/environments", f'{{"lease_s": {number}}}'),
        ("/v2/sandboxes", f'{{"templateID": "base", "timeout": {number}}}'),
        ("/envs/odd/execute", f'{{"command": "true", "timeout": {number}}}'),
        ("/envs/odd/run_in_session", f'{{"action_type": "bash", "command": "true", "expect": ["x"], "timeout": {number}}}'),
        (f"{ROCK}/start_async", f'{{"image": "i", "auto_clear_time_minutes": {number}}}'),
        (f"{ROCK}/start_async", f'{{"image": "i", "cpus": {number}}}'),
        (f"{ROCK}/execute", f'{{"sandbox_id": "odd-rock", "command": "true", "timeout": {number}}}'),
        ("/run_code", f'{{"code": "true", "language": "bash", "run_timeout": {number}}}'),
        ("/run_code", f'{{"code": "true", "language": "bash", "compile_timeout": {number}}}'),
        ("/run_jupyter", f'{{"cells": [], "total_timeout": {number}}}'),
    ]
    if number != "0":  # which is no limit
        bodies.append(("/run_jupyter", f'{{"cells": [], "cell_timeout": {number}}}'))
    assert [(path, body) for path, body in bodies if not refused(odd, path, body)] == []
    opened = odd.post("/api/v1/environments", json={"lease_s": 60}).json()
    try:
        assert refused(odd, f"/api/v1/environments/{opened['id']}/lease", f'{{"lease_s": {number}}}')
        if number != "0":  # which ends the sandbox
            assert refused(odd, f"/sandboxes/{opened['id']}/timeout", f'{{"timeout": {number}}}')
        seen = odd.get(f"/api/v1/environments/{opened['id']}").json()
        assert seen["ends_at"] == opened["ends_at"]
    finally:
        odd.delete(f"/api/v1/environments/{opened['id']}")


def test_half_of_a_surrogate_pair_is_refused_where_it_is_no_text(odd: httpx.Client) -> None:
    bodies = [
        ("/api/v1/environments", f'{{"metadata": {{"k": {HALF}}}}}'),
        ("/api/v1/environments", f'{{"metadata": {{{HALF}: 1}}}}'),
        ("/v2/sandboxes", f'{{"templateID": "base", "envVars": {{"A": {HALF}}}}}'),
        ("/envs/odd/run_in_session", f'{{"action_type": "bash", "command": "true", "session": {HALF}}}'),
        ("/envs/odd/close_session", f'{{"session": {HALF}}}'),
        ("/run_code", f'{{"code": {HALF}, "language": "bash"}}'),
        ("/run_code", f'{{"code": "true", "language": "bash", "files": {{{HALF}: "YQ=="}}}}'),
    ]
    assert [(path, body) for path, body in bodies if not refused(odd, path, body)] == []


def test_a_shell_is_free_after_an_interactive_program_that_could_never_begin(odd: httpx.Client) -> None:
    # Given a line that no shell can be given
    line = {"action_type": "bash", "command": "\0", "is_interactive_command": True, "expect": [">"]}
    assert odd.post("/envs/odd/run_in_session", json=line).status_code == 400
    seen = odd.post("/envs/odd/run_in_session", json={"action_type": "bash", "command": "echo free"})
    assert (seen.status_code, seen.json()["output"]) == (200, "free\n")


def test_patterns_cost_no_more_than_the_text_that_they_are_looked_for_in(odd: httpx.Client) -> None:
    # Given patterns on which engines that backtrack take for ever, in what a program prints before it waits
    patterns = [r"(?:a|aa)+" + f"{number}$" for number in range(63)]
    line = {"action_type": "bash", "command": "printf 'a%.0s' $(seq 1000); printf now; sleep 60", "is_interactive_command": True}
    line |= {"expect": [*patterns, "now"], "timeout": 60}
    answer = odd.post("/envs/odd/run_in_session", json=line)
    assert answer.status_code == 200, answer.text
    assert answer.json()["expect_string"] == "now"
    assert odd.post("/envs/odd/run_in_session", json={"action_type": "bash_interrupt"}).status_code == 200
    # And more than 64 are refused, and any that would take much memory, or together much time
    assert refused(odd, "/envs/odd/run_in_session", json.dumps({**line, "expect": ["a"] * 65}))
    large = [f"(a?){{1000}}{number}" for number in range(3)]
    for wrong in (["(?:(?:a{100}){100}){100}"], ["(?:" * 500 + "a" + "+)*" * 500], ["(?=a)"], large):
        answer = odd.post("/envs/odd/run_in_session", json={**line, "expect": wrong})
        assert (answer.status_code, answer.json()["swerexception"]["class_path"]) == (511, "builtins.ValueError")


@pytest.mark.parametrize("line", [b"X-Many: " + b"x" * 100 + b"\r\n", b"x" * 110])
def test_headers_without_end_are_refused_before_they_fill_the_memory(served: Served, line: bytes) -> None:
    # Given a caller who sends headers, or one header, for as long as anybody listens
    with served.connected() as caller:
        caller.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\nX-One: ")
        for _ in range(1000):
            with contextlib.suppress(ConnectionError):
                caller.sendall(100 * line)
            if select.select([caller], [], [], 0.01)[0]:
                break
        answer = caller.recv(1000)
    assert answer.startswith(b"HTTP/1.1 431 "), answer
    assert httpx.get(f"{served.url}/health", headers={"X-Long": "x" * 30_000}).status_code == 200


def test_what_follows_a_chunked_body_is_no_header(served: Served) -> None:
    # Given a caller whose token comes where headers have ended
    with served.http("late") as late, served.connected() as caller:
        token = late.headers["X-API-Key"].encode()
        caller.sendall(b"POST /api/v1/environments HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        caller.sendall(b"2\r\n{}\r\n0\r\nX-API-Key: " + token + b"\r\n\r\n")
        assert caller.recv(1000).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("date", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-10:00"])
def test_dates_at_the_ends_of_the_calendar_are_the_callers_affair(odd: httpx.Client, date: str) -> None:
    assert odd.get("/v2/sandboxes", params={"startedAfter": date}).status_code in (200, 400)


def test_of_many_who_make_a_lease_longer_at_once_the_longest_counts(served: Served) -> None:
    lengths = [3000, *range(1000, 1012)]
    with served.http("leases") as http:
        opened = http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 60}).json()["sandboxID"]
        began_at = http.get(f"/api/v1/environments/{opened}").json()["created_at"]

        async def all_at_once() -> list[int]:
            async with httpx.AsyncClient(base_url=served.url, headers=http.headers, timeout=60) as many:
                said = [many.post(f"/v2/sandboxes/{opened}/connect", json={"timeout": length}) for length in lengths]
                return [answer.status_code for answer in await asyncio.gather(*said)]

        assert asyncio.run(all_at_once()) == [200] * len(lengths)
        # Then that is what callers are told, and what the scheduler keeps
        assert http.get(f"/api/v1/environments/{opened}").json()["ends_at"] >= began_at + max(lengths)
        query = f"SELECT id FROM environments WHERE id = '{opened}' AND ends_at >= {began_at + max(lengths)}"
        served.live.until(lambda: served.live.rows(query))
        http.delete(f"/sandboxes/{opened}")


def test_a_command_of_rock_that_may_take_for_ever_leaves_its_sandbox_a_lease(served: Served, odd: httpx.Client) -> None:
    # When a command may take as long as any action may
    body = {"sandbox_id": "odd-rock", "command": "true", "timeout": 1e9}
    assert odd.post(f"{ROCK}/execute", json=body).json()["status"] == "Success"
    # Then the scheduler has taken note: nothing is told that it does not keep
    (sandbox,) = (one for one in odd.get("/api/v1/environments").json() if one["name"] == "odd-rock")
    query = f"SELECT id FROM environments WHERE id = '{sandbox['id']}' AND ends_at > {sandbox['ends_at'] - 60}"
    served.live.until(lambda: served.live.rows(query))
