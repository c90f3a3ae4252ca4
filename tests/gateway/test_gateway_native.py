"""The gateway's own API against a whole stack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.gateway.conftest import Served

Run = Callable[..., dict[str, object]]


def test_a_command_runs_in_an_environment(run: Run) -> None:
    done = run("echo $GREETING; echo oops >&2; exit 3", variables={"GREETING": "hello"})
    assert (done["status"], done["exit_code"], done["stdout"], done["stderr"]) == ("succeeded", 3, "hello\n", "oops\n")


def test_a_command_beyond_its_timeout_is_a_result(run: Run) -> None:
    done = run("echo begun; sleep 60", timeout_s=0.5)
    assert (done["status"], done["exit_code"], done["stdout"]) == ("timed_out", None, "begun\n")


def test_files_go_in_and_come_out(http: httpx.Client, environment: str, run: Run) -> None:
    data = bytes(range(256)) * 8000
    assert http.put(f"{environment}/files", params={"path": "in/data.bin"}, content=data).status_code == 204
    assert run("wc -c < in/data.bin; cp in/data.bin out.bin")["stdout"] == "2048000\n"
    assert http.get(f"{environment}/files", params={"path": "out.bin"}).content == data


def test_a_file_that_is_not_there_is_the_callers_affair(http: httpx.Client, environment: str) -> None:
    answer = http.get(f"{environment}/files", params={"path": "nowhere"})
    assert answer.status_code == 400
    assert "nowhere" in answer.json()["error"]["message"]


def test_a_command_that_is_sent_again_with_its_key_runs_once(http: httpx.Client, environment: str, run: Run) -> None:
    # Given a command with an effect, sent several times at once and once more afterwards
    def send(_: int = 0) -> dict[str, object]:
        headers = {"Idempotency-Key": "once"}
        return dict(http.post(f"{environment}/exec", json={"command": "echo ran >> ledger; cat ledger"}, headers=headers).json())

    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(send, range(4)), send()]
    # Then all have the one result, and the effect is there once
    assert {str(answer["stdout"]) for answer in answers} == {"ran\n"}
    assert run("cat ledger")["stdout"] == "ran\n"


def test_an_environment_is_opened_once_per_key_and_per_name(http: httpx.Client) -> None:
    def open_one(headers: dict[str, str], **body: str) -> str:
        answer = http.post("/api/v1/environments", json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    with ThreadPoolExecutor(4) as threads:
        by_key = set(threads.map(lambda _: open_one({"Idempotency-Key": "k1"}), range(4)))
        by_name = set(threads.map(lambda n: open_one({"Idempotency-Key": f"n{n}"}, name="one"), range(4)))
    assert len(by_key) == 1 and len(by_name) == 1 and by_key != by_name
    # When they are closed, the name is free again
    for environment in by_key | by_name:
        assert http.delete(f"/api/v1/environments/{environment}").status_code == 204
    again = open_one({}, name="one")
    assert again not in by_name
    assert http.delete(f"/api/v1/environments/{again}").status_code == 204


def test_owners_see_their_own_job_only(served: Served, http: httpx.Client, environment: str) -> None:
    with served.http("others") as other:
        assert other.get(environment).status_code == 404
        assert other.post(f"{environment}/exec", json={"command": "true"}).status_code == 404
        assert other.delete(environment).status_code == 404
        assert environment.rpartition("/")[2] not in [one["id"] for one in other.get("/api/v1/environments").json()]
    assert environment.rpartition("/")[2] in [one["id"] for one in http.get("/api/v1/environments").json()]


def test_a_closed_environment_is_gone(http: httpx.Client) -> None:
    environment = http.post("/api/v1/environments", json={}).json()["id"]
    address = f"/api/v1/environments/{environment}"
    assert http.delete(address).status_code == 204
    assert http.delete(address).status_code == 404
    assert http.post(f"{address}/exec", json={"command": "true"}).status_code == 404


def test_an_environment_ends_with_its_lease(served: Served, http: httpx.Client) -> None:
    opened = http.post("/api/v1/environments", json={"lease_s": 1}).json()
    # Then it closes while a command runs in it, and is not found
    done = http.post(f"/api/v1/environments/{opened['id']}/exec", json={"command": "sleep 60"})
    assert (done.status_code, done.json()["error"]["kind"]) == (409, "cancelled")
    served.live.until(lambda: http.get(f"/api/v1/environments/{opened['id']}").status_code == 404)
    assert served.live.rows(f"SELECT state FROM environments WHERE id = '{opened['id']}'") == [("closed",)]


def test_a_renewed_lease_lasts(served: Served, http: httpx.Client) -> None:
    first, second = (http.post("/api/v1/environments", json={"lease_s": 1}).json()["id"] for _ in range(2))
    assert http.post(f"/api/v1/environments/{first}/lease", json={"lease_s": 300}).status_code == 200
    served.live.until(lambda: http.get(f"/api/v1/environments/{second}").status_code == 404)
    assert http.post(f"/api/v1/environments/{first}/exec", json={"command": "true"}).json()["exit_code"] == 0
    http.delete(f"/api/v1/environments/{first}")


def test_a_name_whose_environment_has_ended_by_itself_is_free(served: Served, http: httpx.Client) -> None:
    # Given an environment that ended without the gateway's knowledge
    opened = http.post("/api/v1/environments", json={"name": "ended"}).json()
    with served.live.client("tests") as client:
        client.cancel(trajectory=opened["trajectory"])
        served.live.until(lambda: served.live.rows(f"SELECT id FROM environments WHERE id = '{opened['id']}' AND ended_at IS NOT NULL"))
    # Then it is not found, and its name gives another one
    again = http.post("/api/v1/environments", json={"name": "ended"}).json()
    assert again["id"] != opened["id"] and http.get(f"/api/v1/environments/{opened['id']}").status_code == 404
    http.delete(f"/api/v1/environments/{again['id']}")


def test_an_image_where_nodes_have_none_is_a_label(served: Served, http: httpx.Client) -> None:
    opened = http.post("/api/v1/environments", json={"image": "python:3.12"})
    assert (opened.status_code, opened.json()["image"]) == (201, "python:3.12")
    assert "python:3.12 is a label only" in served.live.log("gateway")
    rows = served.live.rows(f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{opened.json()['id']}'")
    assert rows == [("python:3.12",)]
    http.delete(f"/api/v1/environments/{opened.json()['id']}")


def test_an_action_can_be_cancelled_and_picked_up(served: Served, http: httpx.Client, environment: str) -> None:
    # Given a command whose caller waits
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(http.post, f"{environment}/exec", json={"command": "sleep 60"})
        running = "SELECT id FROM actions WHERE kind = 'cpu.exec' AND status = 'running' AND environment = '{}'"
        served.live.until(lambda: served.live.rows(running.format(environment.rpartition("/")[2])))
        ((action,),) = served.live.rows(running.format(environment.rpartition("/")[2]))
        # When it is cancelled by its id
        assert http.get(f"/api/v1/actions/{action}").json()["status"] == "running"
        assert http.delete(f"/api/v1/actions/{action}").status_code == 202
        assert waiting.result().json()["error"]["kind"] == "cancelled"
    # Then its state can be asked for
    assert http.get(f"/api/v1/actions/{action}", params={"wait_s": 10}).json()["status"] == "cancelled"
    # And the same holds for one that has a result
    http.post(f"{environment}/exec", json={"command": "echo kept"}, headers={"Idempotency-Key": "kept"})
    ids = [line.split()[-1] for line in served.live.log("gateway").splitlines() if f"POST {environment}/exec" in line]
    found = http.get(f"/api/v1/actions/{ids[-1]}").json()
    assert (found["status"], found["result"]["stdout"]) == ("succeeded", "kept\n")


def test_a_caller_that_hangs_up_takes_its_command_along(served: Served, environment: str) -> None:
    with served.http() as other, contextlib.suppress(httpx.ReadTimeout):
        other.post(f"{environment}/exec", json={"command": "sleep 60"}, timeout=1)
    query = f"SELECT status FROM actions WHERE kind = 'cpu.exec' AND environment = '{environment.rpartition('/')[2]}'"
    served.live.until(lambda: served.live.rows(query) == [("cancelled",)])


def test_what_is_wrong_is_said_in_one_line(http: httpx.Client, environment: str) -> None:
    for body in ({}, {"command": ""}, {"command": "true", "unit": 1}, {"command": "true", "timeout_s": -1}):
        answer = http.post(f"{environment}/exec", json=body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["kind"] == "bad_request" and "\n" not in answer.json()["error"]["message"]


def test_services_score_and_give_logprobs(http: httpx.Client) -> None:
    scored = http.post("/api/v1/score", json={"service": "judge", "items": [{"prompt": "a", "response": "b"}] * 3})
    assert scored.status_code == 200 and len(scored.json()["scores"]) == 3 and scored.json()["act"]["execution_s"] >= 0
    found = http.post("/api/v1/logprobs", json={"service": "teacher", "token_ids": [[1, 2, 3], [4, 5]]})
    assert found.status_code == 200 and [len(one) for one in found.json()["logprobs"]] == [2, 1]


def test_items_that_a_model_cannot_take_are_a_bad_request(http: httpx.Client) -> None:
    answer = http.post("/api/v1/score", json={"service": "judge", "items": ["neither prompt nor response"]})
    assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "bad_request")


def test_a_service_that_nobody_declares_is_a_bad_request(http: httpx.Client) -> None:
    answer = http.post("/api/v1/generate", json={"service": "nobody", "prompts": ["a"]})
    assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "bad_request")
    assert "nobody" in answer.json()["error"]["message"]
