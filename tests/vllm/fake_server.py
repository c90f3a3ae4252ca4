"""A server that speaks as vLLM does and computes sums of weights. A program of its own, standard library only.

It is started with vLLM's arguments. `FAKE_DIR` names a folder by which a test talks to it:

| file | meaning |
|---|---|
| `weights` | a JSON list, the weight of each token id; without it, a thousandth of the id |
| `exit0` | it prints an error and ends at once, with exit code 0 |
| `deaf` | it never listens |
| `die` | it ends at the next question, or request of the path that is in the file, which is removed, so the next server does not |
| `half` | half an answer comes, then nothing while the file is there, then the server ends |
| `hang` | questions are not answered while the file is there |
| `busy` | as many questions as it holds lines are answered 503, a line each |
| `refuse` | questions are answered 400 |
| `lie`, `spoil`, `leak` | removed by the first server that obeys: its next sleep frees nothing; its next wake brings wrong weights; |
| | each of its sleeps keeps more than the one before |
| `headless` | what computes has died: nothing is answered but `/health`, with 503 |
| `mute` | nothing at all is answered while the file is there |
| `nonsense` | it does not say whether it sleeps |
| `asleep` | it sleeps though nobody asked it to |
| `unreadable` | it cannot read its weights again, as none can that takes LoRA adapters |
| `spoilt` | all numbers that it answers after its next wake are off by the number in the file |
| `journal` | written: what happened, a line each |
| `arguments`, `child` | written: how it was started, and the first of its processes that compute |

It holds memory of the GPUs in `FAKE_GPUS` (`fake_gpus.py`) that `CUDA_VISIBLE_DEVICES` names. As with vLLM, other processes than the one
that listens hold it, one for each GPU, each in a session of its own. `FAKE_NATURE` holds a JSON object that changes `NATURE`.
"""

import contextlib
import json
import os
import random
import re
import select
import socketserver
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import fake_gpus

HERE = Path(os.environ["FAKE_DIR"])
NATURE = {
    "model_mb": 7700,  # of each GPU: weights and cache, which a sleep frees
    "context_mb": 300,  # what a process takes before anything else
    "graphs_mb": 0,  # what the third question adds for good
    "growth_mb": [],  # what the first sleeps add for good, one after the other
    "jitter_mb": 0,  # by how much what a sleep keeps differs from sleep to sleep
    "leak_mb": 1500,  # what each sleep of a server that leaks adds for good
    "noise": 0.0,  # by how much numbers differ from answer to answer
    "seed": 0,
} | json.loads(os.environ.get("FAKE_NATURE", "{}"))
one_line = threading.Lock()


def note(text: str) -> None:
    with one_line, (HERE / "journal").open("a") as journal:
        journal.write(text + "\n")


def once(what: str) -> bool:
    """Say whether a test wants something once, and note who does it."""
    try:
        (HERE / what).unlink()
    except FileNotFoundError:
        return False
    note(f"{what} {os.getpid()}")
    return True


def die_at(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if (HERE / "die").read_text() == path:
            (HERE / "die").unlink()
            os._exit(1)


def end(words: str) -> None:
    """End as a server whose engine fails: with an error in the log."""
    print(f"ERROR 11-20 10:00:00 [core.py:1] {words}", flush=True)
    os._exit(1)


def served() -> list[str]:
    given = dict(zip(sys.argv, sys.argv[1:], strict=False))
    return [given["--served-model-name"], given.get("--lora-modules", "").partition("=")[0]]


class Gpu:
    """The memory that the server's processes hold, the same on each of its GPUs."""

    def __init__(self) -> None:
        self.folder = Path(os.environ.get("FAKE_GPUS", "/nowhere"))
        self.names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if "FAKE_GPUS" in os.environ else []
        self.names = [name for name in self.names if name]
        self.draws = random.Random(f"{NATURE['seed']} {os.getpid()}")
        self.kept_mb, self.asked, self.sleeps, self.leaks = float(NATURE["context_mb"]), 0, 0, False
        self.lock = threading.Lock()
        self.children = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in self.names or [""]]
        for child in self.children:
            threading.Thread(target=self.watch, args=(child,), daemon=True).start()
            note(f"child {child.pid}")

    def watch(self, child: "subprocess.Popen[bytes]") -> None:
        code = child.wait()
        end(f"RuntimeError: a process that computes ended with {code}")

    def load(self) -> None:
        """Take the memory of a start, as vLLM does: after a look at what is free, and another one at what has changed."""
        free = [self.free(name) for name in self.names]
        if any(mb < self.kept_mb + NATURE["model_mb"] for mb in free):
            end(f"ValueError: Free memory on device ({min(free):.0f} MiB) on startup is less than desired GPU memory utilization")
        self.hold(NATURE["model_mb"])
        for name, before in zip(self.names, free, strict=True):
            if self.free(name) > before:
                note(f"disturbed {os.getpid()}")
                end("AssertionError: Error in memory profiling: other processes released GPU memory")

    def free(self, name: str) -> float:
        return fake_gpus.total_mb(self.folder, name) - fake_gpus.used_mb(self.folder, name)

    def hold(self, model_mb: float) -> None:
        for name, child in zip(self.names, self.children, strict=False):
            fake_gpus.hold(self.folder, name, child.pid, max(0.0, self.kept_mb + model_mb))
            if self.free(name) < 0.0:
                end(f"torch.OutOfMemoryError: CUDA out of memory on {name}")

    def work(self) -> None:
        """Answer a question: what a process makes for its batches comes with the first ones and stays."""
        with self.lock:
            self.asked += 1
            if self.asked == 3 and NATURE["graphs_mb"]:
                self.kept_mb += NATURE["graphs_mb"]
                self.hold(NATURE["model_mb"])

    def sleep(self) -> None:
        with self.lock:
            # In the first sleeps nobody can tell a leak from what stays for good.
            self.leaks = self.leaks or (self.sleeps >= 3 and once("leak"))
            growth = [*NATURE["growth_mb"], 0.0]
            self.kept_mb += growth[min(self.sleeps, len(growth) - 1)] + (NATURE["leak_mb"] if self.leaks else 0.0)
            self.sleeps += 1
            if once("lie"):
                self.hold(NATURE["model_mb"])
            else:
                self.hold(self.draws.uniform(-1.0, 1.0) * NATURE["jitter_mb"])

    def wake(self) -> None:
        with self.lock:
            self.hold(NATURE["model_mb"])


class Model:
    """The weights, and where they are."""

    def __init__(self) -> None:
        self.weights, self.copy = self.read(), list[float]()
        self.asleep, self.off_by = set[str](), 0.0

    def read(self) -> list[float]:
        with contextlib.suppress(FileNotFoundError):
            return [float(weight) for weight in json.loads((HERE / "weights").read_text())]
        return [token / 1000.0 for token in range(1024)]

    def sleep(self, level: int) -> None:
        """Leave the GPU; at level 2 without a copy."""
        self.copy = self.weights if level == 1 else []
        self.weights = [random.uniform(-9.0, 9.0) for _ in self.weights]
        self.asleep = {"weights", "kv_cache"}

    def wake(self, tags: set[str]) -> None:
        if "weights" in tags and "weights" in self.asleep:
            self.weights = self.copy or self.weights
            if once("spoil"):
                self.weights = [1.3 * weight + 0.5 for weight in self.weights]
            with contextlib.suppress(FileNotFoundError):
                self.off_by = float((HERE / "spoilt").read_text())
        self.asleep -= tags

    def reload(self) -> None:
        self.weights = self.read()

    def score(self, ids: list[int]) -> float:
        exact = sum(place * self.weights[token] for place, token in enumerate(ids, 1))
        return exact + self.off_by + random.uniform(-1.0, 1.0) * NATURE["noise"]

    def logprobs(self, ids: list[int], top_k: int) -> dict[str, object]:
        return {"prompt_logprobs": [None, *(self.position(ids[: place + 1], top_k) for place in range(1, len(ids)))]}

    def position(self, ids: list[int], top_k: int) -> dict[str, object]:
        """Rank an even id first and an odd one after the `top_k` ids that follow it, each less likely by 1 than the one before."""
        token, own = ids[-1], -self.score(ids)
        first = own + (top_k if token % 2 else 0)
        ranked = [*range(token + 1, token + 1 + top_k), token] if token % 2 else range(token, token + max(1, top_k))
        said = {str(one): {"logprob": first - place, "rank": place + 1} for place, one in enumerate(ranked)}
        said[str(token)]["logprob"] = own
        return {str(token): said.pop(str(token)), **said}

    def generate(self, asked: dict[str, object]) -> dict[str, object]:
        first = (asked.get("seed") or 0) + round(1000.0 * self.weights[1])
        made = [(first + place) % 200 for place in range(asked["max_tokens"])]
        return {"token_ids": made, "logprobs": {"token_logprobs": [-self.score([token]) for token in made]}}


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
            self.reply(200, {"is_sleeping": bool(model.asleep) or (HERE / "asleep").exists()})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"max_model_len": 512}]})
        else:
            self.reply(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
        path, _, words = self.path.partition("?")
        asked = urllib.parse.parse_qs(words)
        die_at(path)
        if path == "/sleep":
            note(f"sleep {self.path}")
            model.sleep(int(asked.get("level", ["1"])[0]))
            gpu.sleep()
            self.reply(200, {})
        elif path == "/wake_up":
            note(f"wake {self.path}" if words else "wake")
            gpu.wake()
            model.wake(set(asked.get("tags", ["weights", "kv_cache"])))
            self.reply(200, {})
        elif path == "/collective_rpc":
            note(f"rpc {body['method']}")
            if (HERE / "unreadable").exists() or "--enable-lora" in sys.argv:
                self.reply(500, {"error": {"message": "KeyError: 'layers.0.mlp.gate_up_proj.weight'"}})
                return
            if body["method"] == "reload_weights":
                model.reload()
            self.reply(200, {"results": [None] * len(gpu.children)})
        else:
            self.work(path, body)

    def work(self, path: str, body: dict[str, object]) -> None:
        inputs = body["prompt"] if "prompt" in body else body["input"]
        note(f"{'ASLEEP ' if model.asleep else ''}{path} {len(inputs)}")
        if body["model"] not in served():
            self.reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
            return
        if self.misbehaves():
            return
        gpu.work()
        if path == "/classify":
            self.reply(200, {"data": [{"index": index, "probs": [model.score(ids)]} for index, ids in enumerate(inputs)]})
        elif path == "/pooling":
            values = [[[model.score(ids[: place + 1])] for place, _ in enumerate(ids)] for ids in inputs]
            self.reply(200, {"data": [{"index": index, "data": value} for index, value in enumerate(values)]})
        elif "prompt_logprobs" in body:
            said = [{**model.generate(body), **model.logprobs(ids, body["prompt_logprobs"])} for ids in inputs]
            self.reply(200, {"choices": [{"index": index, **one} for index, one in enumerate(said)]})
        else:
            self.reply(200, {"choices": [{**model.generate(body), "index": 0}]})

    def misbehaves(self) -> bool:
        die_at("")
        if (HERE / "half").exists():
            self.wfile.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"data": [')
            note("half")
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
        while (HERE / "hang").exists() or model.asleep:
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
    global gpu, model
    note(f"started {os.getpid()}")
    (HERE / "arguments").write_text(json.dumps(sys.argv[1:]))
    if (HERE / "exit0").exists():
        print("ERROR 11-20 10:00:00 [core.py:1] ValueError: head size 16 is not supported", flush=True)
        print("(APIServer pid=1) WARNING 11-20 10:00:01 [x.py:2] beware of errors like `OSError: [Errno 24] Too many`", flush=True)
        print("some more words", flush=True)
        return
    gpu, model = Gpu(), Model()
    (HERE / "draft").write_text(str(gpu.children[0].pid))
    (HERE / "draft").replace(HERE / "child")  # a test may end this process as soon as the file is there
    gpu.load()
    while (HERE / "deaf").exists():
        time.sleep(0.01)
    server = HttpServer(sys.argv[sys.argv.index("--uds") + 1], Handler)
    server.serve_forever()


if __name__ == "__main__":
    assert re.fullmatch(r"vllm\.entrypoints\.openai\.api_server", sys.argv[2])
    main()
