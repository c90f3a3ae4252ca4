"""Connections to a Redis whose host is gone without a word: no packet of it arrives any more, so none of them ends by itself."""

from __future__ import annotations

import subprocess
import sys
import time

from redis import Redis, RedisError

from app.local.processes import wait_until
from tests.conftest import redis_binary
from tests.hosts.link import Weather
from tests.hosts.network import FIRST, beside

FOUND_S = 15.0
"""Each is found within 5 s; a busy machine may take longer to say so. Without options of TCP it takes minutes."""

PROGRAM = """
import sys, threading
from app.broker.redis_intake import RedisIntake
from app.celery import make_app
from kombu import Consumer
from tangram.connection import open_store
from tangram.settings import Settings
from workers.consumer import queue_of

url = sys.argv[1]
settings = Settings(broker_url=url, result_url=url, connect_timeout_s=200.0)
app = make_app(settings)
subscription = open_store(url, 200.0).pubsub()
subscription.psubscribe("a*")
subscription.get_message(timeout=60)
intake = RedisIntake(open_store(url, 200.0).connection_pool, ["q"], 1)
consuming = app.connection_for_read()
Consumer(consuming, [queue_of("n")], on_message=print).consume()
storing = app.backend.client.connection_pool.get_connection()
storing.send_command("BLPOP", "nothing", 0)

def drain():
    while True:
        try:
            consuming.drain_events(timeout=150)
        except TimeoutError:
            pass

def watch(name, wait):
    try:
        wait()
    except Exception as error:
        sys.stdout.write(f"{name}\\n")
        sys.stdout.flush()

waits = {
    "subscription": lambda: [subscription.get_message(timeout=150) for _ in range(9)],
    "intake": lambda: [intake.take(150, 1) for _ in range(9)],
    "consumer": drain,
    "results": storing.read_response,
}
threads = [threading.Thread(target=watch, args=one) for one in waits.items()]
for one in threads:
    one.start()
print("ready", flush=True)
"""


def test_a_host_that_is_gone_is_found_on_every_connection() -> None:
    with beside("server") as network:
        # Given a Redis on another host, and all kinds of connections to it
        words = ["--port", "7000", "--bind", FIRST, "--save", "", "--protected-mode", "no"]
        redis = subprocess.Popen(network.on("server", [redis_binary(), *words]), stdout=subprocess.DEVNULL)
        url = f"redis://{FIRST}:7000/0"

        def there() -> bool:
            with Redis.from_url(url, socket_timeout=1.0) as client:
                try:
                    return bool(client.ping())
                except RedisError:
                    return False

        assert wait_until(there, 60)
        program = subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE, text=True)
        try:
            assert program.stdout is not None and program.stdout.readline() == "ready\n"
            # When packets are dropped
            network.worsen("server", Weather(inward=False, outward=False))
            began = time.monotonic()
            # Then each connection ends
            found = {program.stdout.readline().strip() for _ in range(4)}
            assert found == {"subscription", "intake", "consumer", "results"}
            took_s = time.monotonic() - began
            print(f"found after {took_s:.1f} s")
            assert took_s < FOUND_S
        finally:
            for process in (program, redis):
                process.kill()
                process.wait(60)
