"""The empty tasks that `bench.overhead` times: one an action, one plain Celery."""

from __future__ import annotations

import os

from celery import Celery

from app.celery import app
from app.routing import action

PLAIN_QUEUE = "plain"

plain = Celery("plain", broker=os.environ.get("TANGRAM_BROKER_URL"), backend=os.environ.get("TANGRAM_RESULT_URL"))
plain.conf.update(task_default_queue=PLAIN_QUEUE, accept_content=["json"], task_serializer="json", result_serializer="json")


@action(app, name="bench.empty", cores=[1])
def empty_action() -> None:
    """Do nothing, under a grant."""


@plain.task(name="bench.plain")  # type: ignore[untyped-decorator]
def empty_task() -> None:
    """Do nothing."""
