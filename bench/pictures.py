"""Takes the picture of the live page that the README shows: `python -m bench.pictures`, in about a minute and a half.

A real stack runs made-up rollouts of three jobs, loses a node on the way, and chromium looks at the first page.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from app.local import stack
from app.local.stack import StackPlan
from bench.tools import free_port, running
from tangram import Client
from tangram.errors import TangramError
from tangram.settings import Settings

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "live-page.png"
LARGEST_KB = 200
LOAD_S = 75.0
_COMMANDS = ("sleep 0.6", "sleep 2", "sleep 4", "exit 1", "sleep 1", "sleep 8")
_SERVICES = """
[services.reward]
engine = "stub"
task = "score"
cells = [1]
memory_mb = 500
restore_s = 0.5
max_concurrency = 2

[services.teacher]
engine = "stub"
task = "logprobs"
cells = [1, 2]
memory_mb = 500
restore_s = 0.5

[quotas.search]
rate_per_s = 5
concurrency = 4
hosts = ["127.0.0.1"]
"""


def roll_out(settings: Settings, job: str, seed: int, stop: threading.Event) -> None:
    """Roll trajectories out until `stop` is set; what is lost with its node begins anew."""
    chance = random.Random(seed)
    with Client(job=job, settings=settings) as client:
        while not stop.is_set():
            try:
                with client.open(trajectory=f"{job}-{chance.randrange(1000):03}", memory_mb=256) as environment:
                    for _ in range(chance.randrange(2, 6)):
                        environment.exec(chance.choice(_COMMANDS), units=chance.choice(([1], [1, 2], [1, 2, 4])), timeout_s=60)
                        stop.wait(chance.random())
                    if chance.random() < 0.8:
                        client.score("reward", [{"prompt": "a", "response": "b"}])
                    else:
                        client.logprobs("teacher", [[1, 2, 3]])
            except TangramError:
                stop.wait(0.5)


def kill(worker: psutil.Process) -> None:
    """End a worker with all that it has started, some of which ends by itself meanwhile."""
    for process in [worker, *worker.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def take(url: str, chromium: str) -> None:
    """Take the picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        page.locator("#live-dot.on").wait_for()
        page.wait_for_timeout(3000)
        page.screenshot(path=PICTURE)
        browser.close()


def main() -> int:
    """Run the stack, take the picture, and say how large it is."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("bench.pictures needs chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "services.toml").write_text(_SERVICES)
        plan = StackPlan(
            nodes=4,
            cores=8,
            memory_mb=8192,
            cells=2,
            cell_memory_mb=1200,
            services_file=Path(folder) / "services.toml",
            web_port=free_port(),
        )
        stop = threading.Event()
        with running(plan) as started:
            settings = stack.settings_of(started, Settings())
            jobs = ("ai-coding", "search-agent", "math")
            rollouts = [threading.Thread(target=roll_out, args=(settings, jobs[seed % 3], seed, stop), daemon=True) for seed in range(36)]
            for rollout in rollouts:
                rollout.start()
            try:
                time.sleep(LOAD_S)
                kill(psutil.Process(started._processes["cpu-3"].identity.pid))
                time.sleep(12)
                take(plan.web_url, chromium)
            finally:
                stop.set()
                for rollout in rollouts:
                    rollout.join(30)
    size_kb = PICTURE.stat().st_size / 1000
    print(f"{PICTURE.relative_to(Path.cwd())}: {size_kb:.0f} kB")
    return 0 if size_kb < LARGEST_KB else 1


if __name__ == "__main__":
    sys.exit(main())
