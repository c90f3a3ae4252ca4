"""The gateway's own API against a whole stack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tangram import Client
from tangram.wire import BLOB_KEY_PREFIX, RESULT_KEY_PREFIX
from tests.gateway.conftest import Served
from tests.gateway.shapes import ROCK

pytestmark = pytest.mark.real

Run = Callable[..., dict[str, object]]


def test_a_command_runs_in_an_environment(run: Run) -> None:
    done = run("echo $GREETING; echo oops >&2; exit 3", variables={"GREETING": "hello"})
    assert (done["status"], done["exit_code"], done["stdout"], done["stderr"]) == ("succeeded", 3, "hello\n", "oops\n")


def test_files_go_in_and_come_out(http: httpx.Client, environment: str, run: Run) -> None:
    data = bytes(range(256)) * 8000
    assert http.put(f"{environment}/files", params={"path": "in/data.bin"}, content=data).status_code == 204
    assert run("wc -c < in/data.bin; cp in/data.bin out.bin")["stdout"] == "2048000\n"
    assert http.get(f"{environment}/files", params={"path": "out.bin"}).content == data
    # And one that is not there is the caller's affair
    answer = http.get(f"{environment}/files", params={"path": "nowhere"})
    assert answer.status_code == 400 and "nowhere" in answer.json()["error"]["message"]


def test_a_key_whose_result_is_not_kept_any_more_is_answered_and_runs_nothing(
    served: Served, http: httpx.Client, environment: str, run: Run
) -> None:
    def send() -> httpx.Response:
        headers = {"Idempotency-Key": "kept for an hour"}
        return http.post(f"{environment}/exec", json={"command": "echo ran >> hours"}, headers=headers)

    # Given a command that ran once, and whose result has expired since
    assert send().status_code == 200
    query = f"SELECT id FROM actions WHERE status = 'succeeded' AND kind = 'cpu.exec' AND environment = '{environment.rpartition('/')[2]}'"
    served.live.until(lambda: served.live.rows(query))
    ((action,),) = served.live.rows(query)
    with served.store() as store:
        assert store.delete(RESULT_KEY_PREFIX + action) == 1
    # When it is sent again; then the caller is told, each time, and it has not run a second time
    for answer in (send(), send()):
        assert (answer.status_code, answer.json()["error"]["cause"]) == (502, "result_lost")
    assert run("cat hours")["stdout"] == "ran\n"


def test_an_environment_is_opened_once_per_key_and_per_name(http: httpx.Client) -> None:
    def open_one(headers: dict[str, str], **body: str) -> str:
        answer = http.post("/api/v1/environments", json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    with ThreadPoolExecutor(4) as threads:
        by_key = set(threads.map(lambda _: open_one({"Idempotency-Key": "k1"}), range(4)))
        by_name = set(threads.map(lambda n: open_one({"Idempotency-Key": f"n{n}"}, name="one"), range(4)))
    assert len(by_key) == 1 and len(by_name) == 1 and by_key != by_name
    for environment in by_key | by_name:
        assert http.delete(f"/api/v1/environments/{environment}").status_code == 204
    again = open_one({}, name="one")
    assert again not in by_name
    assert http.delete(f"/api/v1/environments/{again}").status_code == 204


def test_owners_see_their_own_job_only_in_every_shape(served: Served, http: httpx.Client) -> None:
    opened = http.post("/api/v1/environments", json={"name": "mine"}).json()["id"]
    native = f"/api/v1/environments/{opened}"
    with served.http("others") as other:
        # Given the token of another job; then that has no such environment, by its id or by its name
        assert other.get(native).status_code == other.delete(native).status_code == 404
        assert other.post(f"{native}/exec", json={"command": "true"}).status_code == 404
        for port in (other.get(f"{native}/ports/8000"), other.get("/", headers={"Host": f"8000-{opened}.example.org"})):
            assert port.status_code == 404
        assert opened not in other.get("/api/v1/environments").text and opened not in other.get("/v2/sandboxes").text
        for call in (other.get(f"/sandboxes/{opened}"), other.post(f"/sandboxes/{opened}/connect", json={"timeout": 60})):
            assert call.status_code == 404
        for name in (opened, "mine"):
            assert not other.get(f"/envs/{name}/is_alive").json()["is_alive"]
            said = other.post(f"/envs/{name}/execute", json={"command": ["true"]}).json()
            assert said["swerexception"]["class_path"].endswith("DeploymentNotStartedError")
            assert other.post(f"/envs/{name}/close").status_code == 200
            body = {"sandbox_id": name, "command": ["true"]}
            assert other.get(f"{ROCK}/get_status", params={"sandbox_id": name}).json()["status"] == "Failed"
            assert other.post(f"{ROCK}/execute", json=body).json()["status"] == "Failed"
            assert other.post(f"{ROCK}/stop", json=body).json()["status"] == "Success"
    assert http.get(native).status_code == 200
    http.delete(native)


def test_an_environment_is_reached_by_its_id_whoever_has_opened_it(served: Served, http: httpx.Client, environment: str) -> None:
    with Client("tests", served.live.settings) as client, client.open(trajectory="opened-natively") as opened:
        opened.write_file("a", "native")
        # Given an environment of a native client; then a token of another job does not reach it, also where it asks first
        with served.http("other") as other:
            assert other.get(f"/api/v1/environments/{opened.id}").status_code == 404
        # And each shape reaches it, by a token of its job
        done = http.post(f"/api/v1/environments/{opened.id}/exec", json={"command": "cat a"}).json()
        assert (done["stdout"], http.get(f"/api/v1/environments/{opened.id}").json()["trajectory"]) == ("native", "opened-natively")
        assert http.post(f"/envs/{opened.id}/execute", json={"command": ["cat", "a"]}).json()["stdout"] == "native"
        connected = http.post(f"/sandboxes/{opened.id}/connect", json={"timeout": 600}).json()
        headers = {"E2b-Sandbox-Id": opened.id, "X-Access-Token": connected["envdAccessToken"]}
        assert http.get("/files", params={"path": "a"}, headers=headers).text == "native"
        # And the other way round
        there = client.environment(environment.rpartition("/")[2])
        there.write_file("b", "by the gateway")
        assert http.get(f"{environment}/files", params={"path": "b"}).text == "by the gateway"
    # And the gateway hears of its end from the journal, which is written after the client has been answered
    served.live.until(lambda: http.get(f"/api/v1/environments/{opened.id}").status_code == 404)
    assert http.get(f"/api/v1/environments/{opened.id}").json()["error"]["cause"] == "environment_closed"


def test_an_image_where_nodes_have_none_is_a_label(served: Served, http: httpx.Client) -> None:
    opened = http.post("/api/v1/environments", json={"image": "python:3.12"})
    assert (opened.status_code, opened.json()["image"]) == (201, "python:3.12")
    assert "image 'python:3.12' is a label only" in served.live.log("gateway")
    rows = served.live.rows(f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{opened.json()['id']}'")
    assert rows == [("python:3.12",)]
    http.delete(f"/api/v1/environments/{opened.json()['id']}")
    # And it writes no line of its own into the log
    refused = http.post("/api/v1/environments", json={"image": "x\n2026-11-24 INFO app.gateway.access: POST /forged"})
    assert (refused.status_code, refused.json()["error"]["kind"]) == (400, "bad_request")
    assert "/forged" not in served.live.log("gateway")


def test_an_action_can_be_cancelled_and_picked_up(served: Served, http: httpx.Client, environment: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(http.post, f"{environment}/exec", json={"command": "sleep 60"})
        running = "SELECT id FROM actions WHERE kind = 'cpu.exec' AND status = 'running' AND environment = '{}'"
        served.live.until(lambda: served.live.rows(running.format(environment.rpartition("/")[2])))
        ((action,),) = served.live.rows(running.format(environment.rpartition("/")[2]))
        assert http.get(f"/api/v1/actions/{action}").json()["status"] == "running"
        assert http.delete(f"/api/v1/actions/{action}").status_code == 202
        assert waiting.result().json()["error"]["kind"] == "cancelled"
    # Then its state can be asked for
    assert http.get(f"/api/v1/actions/{action}", params={"wait_s": 10}).json()["status"] == "cancelled"
    # And the same holds for one that has a result
    http.post(f"{environment}/exec", json={"command": "echo kept"}, headers={"Idempotency-Key": "kept"})
    kept = running.replace("running", "succeeded").format(environment.rpartition("/")[2])
    served.live.until(lambda: served.live.rows(kept))
    found = http.get(f"/api/v1/actions/{served.live.rows(kept)[0][0]}").json()
    assert (found["status"], found["result"]["stdout"]) == ("succeeded", "kept\n")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("exec", {}, "command"),
        ("exec", {"command": ""}, "command"),
        ("exec", {"command": "true", "unit": 1}, "unit"),
        ("exec", {"command": "true", "timeout_s": -1}, "timeout_s"),
        ("exec", {"command": "exit 1", "cwd": "/testbed"}, "cwd '/testbed' does not exist"),
        ("exec", {"command": "exit 1", "interpreter": ["no-such-program"]}, "program 'no-such-program' does not exist"),
        ("/api/v1/score", {"service": "judge", "items": ["neither prompt nor response"]}, ""),
        ("/api/v1/generate", {"service": "nobody", "prompts": ["a"]}, "nobody"),
        ("/api/v1/logprobs", {"service": "teacher", "token_ids": [[1, 2]], "top_k": 129}, "top_k: must be a whole number from 0 to 128"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(http: httpx.Client, environment: str, path: str, body: dict[str, Any], says: str) -> None:
    answer = http.post(path if path.startswith("/") else f"{environment}/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "bad_request"), answer.text
    assert says in answer.json()["error"]["message"] and "\n" not in answer.json()["error"]["message"]


def test_services_score_and_give_logprobs(http: httpx.Client) -> None:
    scored = http.post("/api/v1/score", json={"service": "judge", "items": [{"prompt": "a", "response": "b"}] * 3})
    assert scored.status_code == 200 and len(scored.json()["scores"]) == 3 and scored.json()["act"]["execution_s"] >= 0
    asked: dict[str, Any] = {"service": "teacher", "token_ids": [[1, 2, 3], [4, 5]]}
    found, ranked = (http.post("/api/v1/logprobs", json={**asked, **more}).json() for more in ({}, {"top_k": 3}))
    assert [len(one) for one in found["logprobs"]] == [2, 1] and found["ranks"] is None
    assert ranked["logprobs"] == found["logprobs"] and [len(one) for one in ranked["ranks"]] == [2, 1]
    assert [[len(one) for one in row] for key in ("top_ids", "top_logprobs") for row in ranked[key]] == [[3, 3], [3]] * 2


def test_large_arguments_and_results_leave_the_store_with_their_call(
    served: Served, http: httpx.Client, environment: str, run: Run
) -> None:
    store = served.store()
    before = set(store.scan_iter(f"{BLOB_KEY_PREFIX}*"))
    # Given calls without a key that bring much, or are given much
    large = "x" * 300_000
    assert http.post("/run_code", json={"code": "cat", "language": "bash", "stdin": large}).json()["run_result"]["stdout"] == large
    assert http.put(f"{environment}/files", params={"path": "f"}, content=large.encode()).status_code == 204
    assert len(http.get(f"{environment}/files", params={"path": "f"}).content) == 300_000
    assert len(str(run(f"cat f # {large[:100_000]}")["stdout"])) == 300_000
    assert http.post("/api/v1/score", json={"service": "judge", "items": [{"prompt": large, "response": ""}]}).status_code == 200
    # And one that is cancelled, since its caller goes away
    with contextlib.suppress(httpx.ReadTimeout):
        http.post(f"{environment}/exec", json={"command": f"sleep 60 # {large[:100_000]}"}, timeout=1)
    served.live.until(lambda: set(store.scan_iter(f"{BLOB_KEY_PREFIX}*")) <= before)
    # And with a key, the result is there for whoever comes again
    for _ in range(2):
        answer = http.post(f"{environment}/exec", json={"command": "cat f"}, headers={"Idempotency-Key": "large"})
        assert len(answer.json()["stdout"]) == 300_000
    store.close()


def test_a_key_is_for_one_request(http: httpx.Client, environment: str) -> None:
    def sent(method: str, path: str, **more: Any) -> int:
        answer = http.request(method, path, headers={"Idempotency-Key": "one"}, **more)
        assert answer.status_code != 422 or "Idempotency-Key: was used for another request" in answer.text
        return answer.status_code

    files, judge = f"{environment}/files", [{"prompt": "p", "response": "r"}]
    assert [sent("POST", f"{environment}/exec", json={"command": line}) for line in ("echo 1", "echo 2", "echo 1")] == [200, 422, 200]
    assert [sent("PUT", files, params={"path": path}, content=b"a") for path in ("a", "b", "a")] == [204, 422, 204]
    assert [sent("PUT", files, params={"path": "a"}, content=content) for content in (b"a", b"b")] == [204, 422]
    assert [sent("POST", "/api/v1/score", json={"service": "judge", "items": judge * n}) for n in (1, 2, 1)] == [200, 422, 200]
    # Also by another path that asks for the same kind of action
    assert sent("POST", "/classify", json={"model": "judge", "input": "p"}) == 422
    opened = [http.post("/api/v1/environments", json={"memory_mb": mb}, headers={"Idempotency-Key": "one"}) for mb in (16, 17, 16)]
    assert [answer.status_code for answer in opened] == [201, 422, 201]
    http.delete(f"/api/v1/environments/{opened[0].json()['id']}")


def test_fewer_results_than_were_asked_for_are_no_answer(served: Served, http: httpx.Client) -> None:
    # Given a result under a key of which nobody knows any more what it was for
    key = {"Idempotency-Key": "fewer"}
    assert http.post("/classify", json={"model": "judge", "input": "p"}, headers=key).status_code == 200
    with served.store() as store:
        store.delete(*store.scan_iter("tangram-gw-key-*"))
    # Then it is not taken for the results of others
    answer = http.post("/classify", json={"model": "judge", "input": ["p", "q", "r"]}, headers=key)
    assert answer.status_code == 502 and "3 items have 1 results" in answer.json()["error"]["message"]
