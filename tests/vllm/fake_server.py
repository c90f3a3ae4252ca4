"""A server that speaks as vLLM does and computes sums. A program of its own, standard library only.

It is started with vLLM's arguments. `FAKE_DIR` names a folder by which a test talks to it:

| file | meaning |
|---|---|
| `exit0` | it prints an error and ends at once, with exit code 0 |
| `deaf` | it never listens |
| `die` | it ends at the next question, or request of the path that is in the file, which is removed, so the next server does not |
| `half` | half an answer comes, then nothing while the file is there, then the server ends |
| `hang` | questions are not answered while the file is there |
| `busy` | as many questions as it holds lines are answered 503, a line each |
| `refuse` | questions are answered 400 |
| `liar` | it says that it sleeps, and keeps its memory |
| `headless` | what computes has died: nothing is answered but `/health`, with 503 |
| `mute` | nothing at all is answered while the file is there |
| `nonsense` | it does not say whether it sleeps |
| `asleep` | it sleeps though nobody asked it to |
| `journal` | written: what happened, a line each |
| `arguments`, `environment`, `memory`, `child` | written: how it was started, MiB it holds, a process it has set apart |
"""

import contextlib
import json
import os
import re
import select
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

HERE = Path(os.environ["FAKE_DIR"])
AWAKE_MB, ASLEEP_MB = 8000, 300
sleeping = threading.Event()
one_line = threading.Lock()


def note(text: str) -> None:
    with one_line, (HERE / "journal").open("a") as journal:
        journal.write(text + "\n")


def memory(mb: int) -> None:
    draft = HERE / f"memory-{os.getpid()}"
    draft.write_text(str(mb))
    draft.replace(HERE / "memory")


def die_at(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if (HERE / "die").read_text() == path:
            (HERE / "die").unlink()
            os._exit(1)


def served() -> list[str]:
    given = dict(zip(sys.argv, sys.argv[1:], strict=False))
    return [given["--served-model-name"], given.get("--lora-modules", "").partition("=")[0]]


def score(ids: list[int]) -> float:
    return sum(place * token for place, token in enumerate(ids, 1)) / 1000.0


def logprobs(ids: list[int]) -> list[dict[str, object] | None]:
    return [None, *({str(token): {"logprob": -score(ids[: place + 1]), "rank": 1}} for place, token in enumerate(ids) if place)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        headless = (HERE / "headless").exists()
        while (headless and self.path == "/is_sleeping") or (HERE / "mute").exists():
            time.sleep(0.01)
        if headless:
            self.reply(503, {})
        elif self.path == "/is_sleeping" and (HERE / "nonsense").exists():
            self.reply(200, {"sleepy": "very"})
        elif self.path == "/is_sleeping":
            self.reply(200, {"is_sleeping": sleeping.is_set() or (HERE / "asleep").exists()})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"max_model_len": 512}]})
        else:
            self.reply(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
        path = self.path.partition("?")[0]
        die_at(path)
        if path == "/sleep":
            note(f"sleep {self.path}")
            sleeping.set()
            memory(AWAKE_MB if (HERE / "liar").exists() else ASLEEP_MB)
            self.reply(200, {})
        elif path == "/wake_up":
            note("wake")
            sleeping.clear()
            memory(AWAKE_MB)
            self.reply(200, {})
        else:
            self.work(path, body)

    def work(self, path: str, body: dict[str, object]) -> None:
        inputs = body["prompt"] if "prompt" in body else body["input"]
        note(f"{'ASLEEP ' if sleeping.is_set() else ''}{path} {len(inputs)}")
        if body["model"] not in served():
            self.reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
            return
        if self.misbehaves():
            return
        if path == "/classify":
            self.reply(200, {"data": [{"index": index, "probs": [score(ids)]} for index, ids in enumerate(inputs)]})
        elif path == "/pooling":
            values = [[[score(ids[: place + 1])] for place, _ in enumerate(ids)] for ids in inputs]
            self.reply(200, {"data": [{"index": index, "data": value} for index, value in enumerate(values)]})
        elif "prompt_logprobs" in body:
            self.reply(200, {"choices": [{"index": index, "prompt_logprobs": logprobs(ids)} for index, ids in enumerate(inputs)]})
        else:
            made = [(body["seed"] + place) % 200 for place in range(body["max_tokens"])]
            self.reply(200, {"choices": [{"index": 0, "token_ids": made}]})

    def misbehaves(self) -> bool:
        die_at("")
        if (HERE / "half").exists():
            self.wfile.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"data": [')
            while (HERE / "half").exists():
                if self.closed_by_caller():
                    return True
            os._exit(1)
        with one_line, contextlib.suppress(FileNotFoundError):
            lines = (HERE / "busy").read_text().splitlines()
            if lines:
                (HERE / "busy").write_text("\n".join(lines[1:]))
                self.reply(503, {"error": {"message": "too much to do"}})
                return True
        if (HERE / "refuse").exists():
            self.reply(400, {"error": {"message": "not this one"}})
            return True
        while (HERE / "hang").exists() or sleeping.is_set():
            if self.closed_by_caller():
                return True
        return False

    def closed_by_caller(self) -> bool:
        if select.select([self.connection], [], [], 0.01)[0]:
            note("closed by the caller")
            self.close_connection = True
        return self.close_connection

    def reply(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def address_string(self) -> str:
        return "socket"


class HttpServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    note(f"started {os.getpid()}")
    (HERE / "arguments").write_text(json.dumps(sys.argv[1:]))
    (HERE / "environment").write_text(json.dumps(dict(os.environ)))
    if (HERE / "exit0").exists():
        print("ERROR 11-20 10:00:00 [core.py:1] ValueError: head size 16 is not supported", flush=True)
        print(
            "(APIServer pid=1) WARNING 11-20 10:00:01 [x.py:2] beware of errors like `OSError: [Errno 24] Too many open files`", flush=True
        )
        print("some more words", flush=True)
        return
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (HERE / "child").write_text(str(child.pid))
    memory(AWAKE_MB)
    while (HERE / "deaf").exists():
        time.sleep(0.01)
    server = HttpServer(sys.argv[sys.argv.index("--uds") + 1], Handler)
    server.serve_forever()


if __name__ == "__main__":
    assert re.fullmatch(r"vllm\.entrypoints\.openai\.api_server", sys.argv[2])
    main()
