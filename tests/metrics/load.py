"""A load that makes every metric move: two jobs that open, run, read, ask models and call an API, until told to stop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from app.replay.outside_api import OutsideApi
from tangram import Client
from tangram.errors import ActionError, TangramError
from tests.live.support import Live

BURN = "python3 -c 'import time; time.sleep({sleep_s}); end = time.process_time() + 0.1\nwhile time.process_time() < end: pass'"


@contextlib.contextmanager
def loaded(live: Live) -> Iterator[None]:
    """Keep a stack busy."""
    stop = threading.Event()
    with OutsideApi() as api:
        threads = [threading.Thread(target=_trajectories, args=(live, job, api, stop)) for job in ("alpha", "alpha", "beta")]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(600)
    assert not any(thread.is_alive() for thread in threads)


def _trajectories(live: Live, job: str, api: OutsideApi, stop: threading.Event) -> None:
    with live.client(job) as client:
        number = 0
        while not stop.is_set():
            number += 1
            # A node is killed under them, and whoever was on it begins again.
            with contextlib.suppress(ActionError):
                _one(client, f"{job}-{number}", api)


def _one(client: Client, trajectory: str, api: OutsideApi) -> None:
    env = client.open(trajectory=trajectory, memory_mb=64)
    try:
        burning = [env.submit(BURN.format(sleep_s=sleep_s), units=[1, 2], session=f"s{n}") for n, sleep_s in enumerate((3.0, 0.3, 0.1))]
        with contextlib.suppress(ActionError):
            env.read_file("nowhere")
        client.score("judge", [{"prompt": "p", "response": trajectory}])
        client.logprobs("teacher", [[5, 17, 33]])
        client.call("search", method="GET", url=f"{api.base_url}/search?q=x")
        for handle in burning:
            handle.result(timeout_s=600)
    finally:
        with contextlib.suppress(TangramError):
            env.close()
