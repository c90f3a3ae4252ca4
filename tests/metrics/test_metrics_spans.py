"""Spans of an action across client, scheduler and worker, as a collector gets them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.local.stack import StackPlan
from tangram import Client
from tangram.errors import TangramError
from tangram.tracing import EXIT_S
from tests.conftest import RedisUrls
from tests.live.support import Live, running
from tests.metrics.collector import Collector, attributes, collecting

ROOT = Path(__file__).resolve().parents[2]
PRODUCER, CONSUMER, FAILED = 4, 5, 2

TRAINER = """
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tangram import Client
from tangram.errors import ActionError

with Client(job="training") as client:
    env = client.open(trajectory="t1")
    print(env.exec("echo SECRET", units=[1, 2]).stdout)
    try:
        env.read_file("nowhere")
    except ActionError:
        pass
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started


@pytest.fixture(scope="module")
def traced(real_component: None, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Live]:
    variables = {"TANGRAM_OTEL": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    plan = StackPlan(cores=2, memory_mb=4096, api_nodes=0, variables=variables)
    with running(tmp_path_factory.mktemp("spans"), plan) as live:
        yield live


def train(live: Live, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **live.environment, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=False)


def whole(collector: Collector, kind: str) -> dict[str, tuple[str, Any]]:
    """Return the spans of the one action of a kind with their services, by name, as far as they have come."""
    top = next((span for _, span in collector.spans if span.name == f"action {kind}"), None)
    return {span.name: (service, span) for service, span in collector.spans if top is not None and span.trace_id == top.trace_id}


def test_one_command_is_one_trace_across_client_scheduler_and_worker(traced: Live, collector: Collector) -> None:
    done = train(traced, TRAINER)
    assert (done.stdout, done.returncode) == ("SECRET\n\n", 0), done.stderr
    # Then six spans of three processes come
    client, scheduler, worker = "tangram-client", "tangram-scheduler", "tangram-worker-cpu"
    services = {
        "action cpu.exec": client, "submit": client, "queue": scheduler, "grant": scheduler, "execute": worker, "result": client,
    }  # fmt: skip
    traced.until(lambda: {name: service for name, (service, _) in whole(collector, "cpu.exec").items()} == services, 60)
    spans = {name: span for name, (_, span) in whole(collector, "cpu.exec").items()}
    # And all are below the one of the whole action, in which they lie
    top = spans.pop("action cpu.exec")
    assert top.parent_span_id == b"" and {span.parent_span_id for span in spans.values()} == {top.span_id}
    assert all(top.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())
    submit, queue, grant, execute = (spans[name] for name in ("submit", "queue", "grant", "execute"))
    assert submit.start_time_unix_nano <= queue.start_time_unix_nano
    assert max(queue.end_time_unix_nano, execute.end_time_unix_nano) <= grant.end_time_unix_nano
    assert (submit.kind, execute.kind) == (PRODUCER, CONSUMER)
    for said in map(attributes, (top, submit, queue, grant, execute)):
        assert (said["tangram.job"], said["tangram.trajectory"], said["messaging.system"]) == ("training", "t1", "celery")
        assert said["messaging.message.id"]
    assert (attributes(grant)["tangram.node"], attributes(grant)["tangram.dop"]) == ("cpu-0", 2)
    # And nothing of what it was given or printed
    assert "SECRET" not in repr(collector.spans)


def test_a_failure_marks_the_spans_that_it_concerns(traced: Live, collector: Collector) -> None:
    concerned = {"action cpu.read_file", "grant", "execute"}
    traced.until(lambda: concerned <= set(whole(collector, "cpu.read_file")), 60)
    spans = {name: span for name, (_, span) in whole(collector, "cpu.read_file").items()}
    assert {name for name, span in spans.items() if span.status.code == FAILED} == concerned
    assert attributes(spans["action cpu.read_file"])["error.type"] == "ActionRefused"


def test_the_span_of_a_trainer_that_has_its_own_is_the_parent(traced: Live, collector: Collector) -> None:
    # Given a trainer with an OpenTelemetry of its own
    set_up = TRAINER.split("with Client")[0] + (
        "provider = TracerProvider()\nprovider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))\n"
        "trace.set_tracer_provider(provider)\n"
        "with trace.get_tracer('trainer').start_as_current_span('rollout'), Client(job='own') as client:\n"
        "    client.open(trajectory='t2').close()\n"
    )
    assert train(traced, set_up).returncode == 0

    def below() -> tuple[set[str], int]:
        rollout = next((span for _, span in collector.spans if span.name == "rollout"), None)
        spans = [span for _, span in collector.spans if rollout is not None and span.trace_id == rollout.trace_id]
        children = {span.name for span in spans if rollout is not None and span.parent_span_id == rollout.span_id}
        return children, sum(span.name == "execute" for span in spans)

    # Its spans and those of its client go out one after the other.
    traced.until(lambda: below() == ({"action cpu.open", "action cpu.close"}, 2), 60)


def test_a_trainer_without_spans_imports_nothing_for_them(redis_urls: RedisUrls) -> None:
    script = (
        "import sys\nfrom tangram import Action, Client\nwith Client() as client:\n    client.submit(Action(kind='my.task'))\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.exporter', 'opentelemetry.sdk.trace'))]\n"
    )
    urls = {"TANGRAM_BROKER_URL": redis_urls.broker, "TANGRAM_RESULT_URL": redis_urls.result}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TANGRAM_OTEL": "0", **urls}
    subprocess.run([sys.executable, "-c", script], env=env, timeout=120, check=True)
    # And what it sends starts no trace
    with redis_urls.client() as redis:
        assert b"traceparent" not in redis.lindex("actions", 0)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name, value in (("OTEL", "1"), ("BROKER_URL", "redis://x"), ("RESULT_URL", "redis://x")):
        monkeypatch.setenv(f"TANGRAM_{name}", value)
    with pytest.raises(TangramError, match=r"^TANGRAM_OTEL needs opentelemetry: pip install 'arl-tangram\[otel\]'$"):
        Client(job="j")


def test_a_collector_that_is_away_keeps_no_process_from_ending() -> None:
    # Given a process with more spans than fit into its queue, and nobody who takes them
    script = (
        "import time\nfrom tangram import tracing\nfrom tangram.settings import Settings\n"
        "tracing.EXIT_S = 0.1\ntracer = tracing.tracer_of(Settings(otel=True), 'test')\n"
        "for _ in range(3000):\n    tracer.start_span('lost').end()\n"
        "print(time.monotonic())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True)
    # Then it ends soon; OpenTelemetry by itself would try for half a minute
    assert EXIT_S <= 2.0
    assert time.monotonic() - float(done.stdout) < 25.0, done.stderr
