"""Servers that run in an environment, asked through the gateway: by path, by headers and by host name."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import Served
from tests.ports import free_port

pytestmark = pytest.mark.real

SERVER = Path(__file__).with_name("ports_server.py").read_bytes()


@dataclass(frozen=True)
class Port:
    """A port of an environment on which a server listens, and the gateway's address."""

    environment: str
    number: int
    url: str
    token: str

    @property
    def path(self) -> str:
        """The address of the port by path."""
        return f"/api/v1/environments/{self.environment}/ports/{self.number}"

    @property
    def host(self) -> str:
        """The host name of the port."""
        return f"{self.number}-{self.environment}.example.org"


def start(http: httpx.Client, address: str) -> int:
    """Have a command leave the server running in an environment, and return its port."""
    number = free_port()
    assert http.put(f"{address}/files", params={"path": "server.py"}, content=SERVER).status_code == 204
    line = f"python3 server.py {number} ready{number} >log 2>&1 & until [ -e ready{number} ]; do sleep 0.02; done"
    done = http.post(f"{address}/exec", json={"command": line, "timeout_s": 60}).json()
    assert done["exit_code"] == 0, done
    return number


@pytest.fixture(scope="module")
def port(served: Served, http: httpx.Client) -> Iterator[Port]:
    """Give an environment in which the server runs."""
    opened = http.post("/api/v1/environments", json={}).json()["id"]
    address = f"/api/v1/environments/{opened}"
    yield Port(opened, start(http, address), served.url, str(http.headers["X-API-Key"]))
    http.delete(address)


def header_of(answer: httpx.Response, name: str) -> str:
    """Return what the server saw of a header."""
    return ", ".join(value for known, value in answer.json()["headers"] if known.lower() == name)


def test_a_server_is_asked_by_path(http: httpx.Client, port: Port) -> None:
    answer = http.get(f"{port.path}/a%20b/%2e./c?x=1&y=%2F")
    assert answer.status_code == 200
    said = answer.json()
    assert (said["method"], said["path"], said["body"]) == ("GET", "/a%20b/%2e./c?x=1&y=%2F", "")
    assert header_of(answer, "host") == f"localhost:{port.number}"
    root = http.get(port.path)
    assert root.json()["path"] == "/"
    # And a page at the gateway's own address has no origin in a browser
    assert root.headers["content-security-policy"].startswith("sandbox")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_every_method_and_its_body_comes_through(http: httpx.Client, port: Port, method: str) -> None:
    answer = http.request(method, f"{port.path}/thing", content=b"some words", headers={"X-Mine": "yes", "Content-Type": "text/odd"})
    assert answer.status_code == (201 if method == "POST" else 200)
    assert (answer.json()["method"], answer.json()["body"]) == (method, "some words")
    assert (header_of(answer, "x-mine"), header_of(answer, "content-type")) == ("yes", "text/odd")


def test_bytes_go_in_and_come_out_unchanged(http: httpx.Client, port: Port) -> None:
    data = bytes(range(256)) * 1000
    answer = http.post(f"{port.path}/bytes", content=data)
    assert (answer.content, answer.headers["content-type"]) == (data[::-1], "application/octet-stream")
    assert http.get(f"{port.path}/large").content == b"x" * (5 << 20)
    head = http.head(f"{port.path}/large")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(5 << 20), b"")


def test_a_redirect_is_passed_on_with_all_its_headers_and_not_followed(http: httpx.Client, port: Port) -> None:
    answer = http.get(f"{port.path}/moved")
    assert (answer.status_code, answer.headers["location"]) == (302, "/elsewhere")
    assert answer.headers.get_list("vary") == ["a", "b"]
    assert "tangram-cause" not in answer.headers


def test_a_server_is_asked_by_host_name_whatever_the_path(port: Port) -> None:
    # Given paths that the gateway itself serves, too; then the server gets them, also where the name is in capitals
    for host in (port.host, port.host.upper()):
        for path in ("/", "/health", "/files?path=x", "/api/v1/environments", "/a%0Ab"):
            answer = httpx.get(port.url + path, headers={"Host": host, "X-API-Key": port.token})
            assert (answer.status_code, answer.json()["path"]) == (200, path)
            assert header_of(answer, "host") == host
            assert "content-security-policy" not in answer.headers


def test_what_a_browser_keeps_for_an_address_is_kept_for_that_of_one_port_alone(http: httpx.Client, port: Port) -> None:
    by_path = http.get(f"{port.path}/sticky")
    assert by_path.status_code == 200
    assert not {"set-cookie", "strict-transport-security", "clear-site-data"} & set(by_path.headers)
    assert header_of(http.get(port.path, headers={"Cookie": "a=1"}), "cookie") == ""
    headers = {"Host": port.host, "X-API-Key": port.token, "Cookie": "a=1"}
    by_host = httpx.get(f"{port.url}/sticky", headers=headers)
    assert by_host.headers.get_list("set-cookie") == ["a=1; Path=/", "b=2"]
    assert "clear-site-data" not in by_host.headers
    assert header_of(httpx.get(port.url, headers=headers), "cookie") == "a=1"


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({"Origin": "null"}, True),
        ({"Origin": "https://example.org"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://outside.example.org"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({}, False),
    ],
)
def test_a_page_of_another_origin_changes_nothing(http: httpx.Client, port: Port, headers: dict[str, str], is_refused: bool) -> None:
    # Given a form that a page sends to the gateway, or by path to the server of another environment
    for path in ("/envs/none/close", f"{port.path}/thing"):
        answer = http.post(path, headers=headers)
        assert (answer.status_code == 403) == is_refused, answer.text
    # Then one of the gateway's own pages may send it, and what only reads is answered
    assert http.post(f"{port.path}/thing", headers={"Origin": port.url}).status_code == 201
    assert http.get(port.path, headers=headers).status_code == 200
    # And what a server gets under its own name is its own affair
    named = {"Host": port.host, "X-API-Key": port.token, **headers}
    assert httpx.post(f"{port.url}/thing", headers=named).status_code == 201


def test_a_server_is_asked_by_e2bs_headers(port: Port) -> None:
    headers = {"E2b-Sandbox-Id": port.environment, "E2b-Sandbox-Port": str(port.number), "X-API-Key": port.token}
    answer = httpx.post(f"{port.url}/v1/things?n=1", headers=headers, content=b"{}")
    assert (answer.status_code, answer.json()["path"], answer.json()["body"]) == (201, "/v1/things?n=1", "{}")


def test_no_token_of_the_gateway_reaches_the_server_and_its_own_does(served: Served, port: Port) -> None:
    ours = base64.b64encode(f"tangram:{port.token}".encode()).decode()
    for given in ({"Authorization": f"Bearer {port.token}"}, {"Authorization": f"Basic {ours}"}, {"X-API-Key": port.token}):
        answer = httpx.get(port.url + port.path, headers={**given, "E2b-Traffic": "x", "Tangram-Timeout-S": "30"})
        assert answer.status_code == 200
        assert port.token not in answer.text and ours not in answer.text
        assert not [name for name, _ in answer.json()["headers"] if name.lower().startswith(("x-api", "authorization", "e2b-", "tangram-"))]
    # Given a job's token beside the one that admits the request; then it stays here, too
    both = {"X-API-Key": port.token, "Authorization": f"Bearer {served.token('another')}"}
    assert header_of(httpx.get(port.url + port.path, headers=both), "authorization") == ""
    # And an authorization that is the server's reaches it
    for theirs in ("Bearer something-of-theirs", "Basic dXNlcjpwYXNz", "Digest x"):
        answer = httpx.get(port.url + port.path, headers={"X-API-Key": port.token, "Authorization": theirs})
        assert header_of(answer, "authorization") == theirs


def test_a_request_without_a_token_or_with_a_wrong_one_is_refused(port: Port) -> None:
    for headers in ({}, {"Host": port.host}):
        assert httpx.get(port.url + port.path, headers=headers).status_code == 401
        assert httpx.get(port.url + port.path, headers={**headers, "X-API-Key": "wrong"}).status_code == 401
        answer = httpx.get(port.url + port.path, headers={**headers, "X-Access-Token": "wrong"})
        assert (answer.status_code, answer.headers["tangram-cause"]) == (401, "bad_input")


def test_a_port_on_which_nothing_listens_is_told(http: httpx.Client, port: Port) -> None:
    nobody = free_port()
    answer = http.get(f"/api/v1/environments/{port.environment}/ports/{nobody}/x")
    assert (answer.status_code, answer.headers["tangram-cause"]) == (502, "no_answer")
    error = answer.json()["error"]
    assert (error["cause"], error["fault"]) == ("no_answer", "program")
    assert str(nobody) in error["message"] and "127.0.0.1" in error["message"]
    # In E2B's words where E2B's way was taken
    told = httpx.get(port.url, headers={"Host": f"{nobody}-{port.environment}.x", "X-API-Key": port.token})
    assert told.status_code == 502
    words = {"sandboxId": port.environment, "port": nobody, "code": 502, "cause": "no_answer", "fault": "program"}
    assert {**told.json(), "message": ""} == {**words, "message": ""}


def test_a_port_that_is_none_is_a_wrong_request(http: httpx.Client, port: Port) -> None:
    assert http.get(f"/api/v1/environments/{port.environment}/ports/70000").status_code == 400
    named = {"X-API-Key": port.token, "E2b-Sandbox-Id": port.environment}
    for none in ("80x", "+80", "-1", "9" * 5000):
        answer = http.get(f"/api/v1/environments/{port.environment}/ports/{none}")
        assert (answer.status_code, answer.headers["tangram-cause"]) == (400, "bad_input")
        assert httpx.get(f"{port.url}/nothing", headers={**named, "E2b-Sandbox-Port": none}).status_code == 404


def test_an_answer_of_the_gateways_own_has_its_cause_wherever_it_is_given(http: httpx.Client, port: Port) -> None:
    too_large = http.post(f"{port.path}/thing", content=bytes(9 << 20))
    not_served = http.request("PROPFIND", f"{port.path}/thing")
    assert (too_large.status_code, too_large.headers["tangram-cause"]) == (413, "bad_input")
    assert (not_served.status_code, not_served.headers["tangram-cause"]) == (405, "bad_input")


def test_headers_that_either_side_names_as_those_of_its_connection_are_not_passed_on(port: Port) -> None:
    headers = [("X-API-Key", port.token), ("Connection", "keep-alive, X-One"), ("Connection", "x-two"), ("X-One", "1"), ("X-Two", "2")]
    seen = httpx.get(port.url + port.path, headers=[*headers, ("X-Three", "3")])
    assert [name for name, _ in seen.json()["headers"] if name.lower().startswith("x-")] == ["x-three"]
    answer = httpx.get(f"{port.url}{port.path}/hop", headers=headers)
    assert ("x-hop" in answer.headers, answer.headers["x-end"]) == (False, "1")


@pytest.mark.parametrize(
    ("path", "timeout", "status", "cause"),
    [("garbage", "30", 502, "no_answer"), ("never", "0.5", 504, "timeout"), ("never", "soon", 400, "bad_input")],
)
def test_what_keeps_an_answer_from_coming_is_told(http: httpx.Client, port: Port, path: str, timeout: str, status: int, cause: str) -> None:
    answer = http.get(f"{port.path}/{path}", headers={"Tangram-Timeout-S": timeout})
    assert (answer.status_code, answer.headers["tangram-cause"]) == (status, cause)
    assert cause == "bad_input" or answer.json()["error"]["fault"] == "program"
    assert http.get(port.path).status_code == 200


@pytest.mark.parametrize("protocol", ["websocket", "something/2"])
def test_an_upgrade_is_refused(port: Port, protocol: str) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": protocol, "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"}
    answer = httpx.get(f"{port.url}{port.path}/ws", headers={"X-API-Key": port.token, **upgrade})
    assert (answer.status_code, "WebSocket" in answer.text) == (501, True)


def test_a_request_with_a_key_is_sent_to_the_server_once(http: httpx.Client, port: Port) -> None:
    texts = ("first", "first", "second")
    first, again, other = (http.post(f"{port.path}/thing", headers={"Idempotency-Key": "one"}, content=text) for text in texts)
    assert first.json()["body"] == "first" and again.json() == first.json()
    assert (other.status_code, other.headers["Tangram-Cause"]) == (422, "bad_input")


def test_nobody_writes_lines_of_his_own_into_the_log(served: Served, port: Port) -> None:
    assert httpx.get(f"{port.url}/a%0Aforged%1B%20line").status_code == 404
    served.live.until(lambda: "GET /a%0Aforged%1B%20line 404" in served.live.log("gateway"))
    assert "\nforged" not in served.live.log("gateway")
