"""An engine over HTTP that knows containers by what a test says of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.serving import Quiet, serving


def event(action: object, at_s: float, code: object = "137") -> str:
    return json.dumps({"Action": action, "timeNano": int(at_s * 1e9), "Actor": {"Attributes": {"exitCode": code}}})


@dataclass
class FakeEngine:
    """What it answers. Each question for a container's state takes one of `states`, as long as there are any; then it has been removed."""

    address: str = ""
    states: list[dict[str, object]] = field(default_factory=list)
    events: list[str] | None = field(default_factory=list)
    """Its latest events, a line each; None where it never answers when it is asked for them."""
    stopped: threading.Event = field(default_factory=threading.Event)


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    known = FakeEngine()

    class Handler(Quiet):
        def do_GET(self) -> None:
            path, status, said = self.path.partition("?")[0], 200, "{}"
            if path.endswith("/version"):
                said = json.dumps({"ApiVersion": "1.41"})
            elif path.endswith("/events"):
                if known.events is None:
                    known.stopped.wait()
                    return
                said = "".join(f"{line}\n" for line in known.events)
            elif "/containers/" in path and known.states:
                said = json.dumps({"State": known.states.pop(0)})
            elif "/containers/" in path or "/exec/" in path:
                status, said = 404, json.dumps({"message": "there is no such thing"})
            self.send_response(status)
            self.send_header("Content-Length", str(len(said.encode())))
            self.end_headers()
            self.wfile.write(said.encode())

    with serving(Handler) as port:
        known.address = f"tcp://127.0.0.1:{port}"
        try:
            yield known
        finally:
            known.stopped.set()
