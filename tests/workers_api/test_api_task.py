"""The task of an API node: which requests it repeats, how one that fails ends, and what of the answer goes to the scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from app.action_task import Call, NodeRuntime
from app.broker.memory_store import MemoryBroker, MemoryStore
from app.runtime import PROCESS, Runtime, enter
from tangram.blobs import Blobs
from tangram.errors import ActionCancelled, ActionError, ActionFailed
from tangram.settings import Settings
from tests.nodes import GRANT, node_of
from tests.serving import Quiet, serving
from workers.api.requests import MOST_SENT, Requests
from workers.api.tasks import call
from workers.context import ApiContext, provide
from workers.node import Node

Calling = Callable[..., tuple[Call, dict[str, Any]]]


class _Moody(Quiet):
    """Refuses, breaks, drips or answers as its path says, so many times; then answers 200."""

    seen: list[float]
    stop: threading.Event

    def do_GET(self) -> None:
        self.seen.append(time.monotonic())
        kind, times = self.path.partition("?")[0].strip("/").split("/")
        if len(self.seen) > int(times):
            self.send(200)
        elif kind == "broken":
            self.close_connection = True
        elif kind == "drips":
            self.send(200, "1000000")
            while not self.stop.wait(0.02):
                self.wfile.write(b"x")
        else:
            self.send(int(kind))

    do_POST = do_GET

    def send(self, status: int, length: str = "0") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": length, "Retry-After": "7", "X-Cost": "20"}.items():
            if name != "Retry-After" or status == 429:
                self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a request repeated at once."""
    monkeypatch.setattr("workers.api.requests._WAIT_S", (0.0, 0.01))


@pytest.fixture
def moody() -> Iterator[tuple[str, list[float]]]:
    """Run a server that fails as it is told to; give its address, and when it was asked."""
    seen, stop = list[float](), threading.Event()
    with serving(type("Handler", (_Moody,), {"seen": seen, "stop": stop})) as port:
        yield f"127.0.0.1:{port}", seen
        stop.set()


@pytest.fixture
def node() -> Node:
    return node_of()


@pytest.fixture
def called(node: Node, requests: Requests) -> Calling:
    """Return what has the node carry out a call, with parts of its grant."""
    worker = Runtime()

    def carry_out(url: str, *, method: str = "GET", headers: Any = None, timeout_s: float = 60.0, **grant: Any) -> Any:
        header = {"timeout_s": timeout_s, "idempotent": method == "GET"}
        claimed = node.claim("a", {"hosts": ["127.0.0.1"], **GRANT, **grant}, header)  # type: ignore[typeddict-item]
        assert claimed is not None
        enter(worker)
        call.push_request(id="a")
        try:
            return claimed, call.run("q", method, url, headers)
        finally:
            call.pop_request()
            enter(PROCESS)

    enter(worker)
    worker.provide(NodeRuntime, node)  # type: ignore[type-abstract]
    provide(ApiContext(settings=Settings(), blobs=Blobs(MemoryStore(MemoryBroker())), requests=requests))  # type: ignore[arg-type]
    enter(PROCESS)
    return carry_out


@pytest.mark.parametrize(
    ("kind", "times", "status", "sent"),
    [*[(kind, 2, 200, 3) for kind in ("502", "503", "504", "broken")], ("502", 99, 502, MOST_SENT)],
)
def test_what_passes_is_repeated_so_many_times_at_most(
    called: Calling, moody: Any, quick: None, kind: str, times: int, status: int, sent: int
) -> None:
    address, seen = moody
    claimed, answer = called(f"http://{address}/{kind}/{times}")
    assert (answer["status_code"], len(seen)) == (status, sent)
    assert claimed.answer is not None and claimed.answer["requests"] == sent


def test_a_call_that_fails_says_how_many_requests_went_out(called: Calling, node: Node, moody: Any, quick: None) -> None:
    address, seen = moody
    with pytest.raises(ActionFailed):
        called(f"http://{address}/broken/99")
    assert node.call("a").answer == {"status": 0, "requests": len(seen)}


@pytest.mark.parametrize("kind", ["502", "broken"])
def test_a_request_that_is_not_idempotent_is_sent_once(called: Calling, moody: Any, kind: str) -> None:
    address, seen = moody
    if kind == "broken":
        with pytest.raises(ActionFailed, match=f"^POST http://{address}/broken/2: "):
            called(f"http://{address}/broken/2", method="POST")
    else:
        assert called(f"http://{address}/502/2", method="POST")[1]["status_code"] == 502
    assert len(seen) == 1


@pytest.mark.parametrize("may_wait_again", [True, False])
def test_a_refusal_is_the_answer_only_of_an_action_that_may_not_wait_again(called: Calling, moody: Any, may_wait_again: bool) -> None:
    address, _ = moody
    claimed, answer = called(f"http://{address}/429/1", may_wait_again=may_wait_again, usage_header="X-Cost")
    # The scheduler learns what it said either way
    assert claimed.answer is not None and (claimed.answer["retry_after_s"], claimed.answer["tokens"]) == (7.0, 20)
    assert (claimed.waits_again, answer.get("status_code")) == ((True, None) if may_wait_again else (False, 429))


@pytest.mark.parametrize(
    ("path", "options", "cause", "said"),
    [
        ("502/99", {"timeout_s": 0.05}, "api_timeout", "no answer within 0.05 s"),
        ("drips/1", {"timeout_s": 0.3}, "api_timeout", "no answer within 0.3 s"),
        ("refused", {}, "api_failed", "Connection refused"),
        ("200/1", {"hosts": []}, "", "127.0.0.1 is no public address, and the quota does not"),
        ("unreadable", {}, "", "a URL that cannot be read: Invalid port"),
        ("200/1", {"headers": {"X-Key": "geheim\n"}}, "api_failed", "Illegal header value"),
    ],
)
def test_a_call_that_fails_says_why_in_one_line_without_a_secret(
    called: Calling, moody: Any, path: str, options: dict[str, Any], cause: str, said: str
) -> None:
    # Given a call with secrets wherever a request has room for them
    address = "127.0.0.1:1" if path == "refused" else moody[0]
    url = "http://ann:geheim" if path == "unreadable" else f"http://ann:geheim@{address}/{path}?key=geheim#geheim"
    with pytest.raises(ActionError) as caught:
        called(url, **options)
    # Then the caller has the rest of the address, and no secret
    reason = caught.value.reason
    assert said in reason and "geheim" not in repr(caught.value) and "\n" not in reason
    assert path == "unreadable" or reason.startswith(f"GET http://{address}/{path}: ")
    assert not cause or caught.value.cause == cause


def test_a_call_can_be_called_off(called: Calling, node: Node, moody: Any) -> None:
    address, seen = moody
    with ThreadPoolExecutor() as pool:
        calling = pool.submit(called, f"http://{address}/drips/1")
        while not seen:
            time.sleep(0.005)
        node.stop("a", 1, "its trainer cancelled it")
        with pytest.raises(ActionCancelled, match="its trainer cancelled it"):
            calling.result(60)
    assert node.call("a").answer == {"status": 0, "requests": 1}
