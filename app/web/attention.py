"""What on the first page needs an operator's eye, most urgent first, each with the page that tells more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlencode

from app.journal.overview import Document
from app.web.words import address, draining, number, seconds

LONG_WAIT_S: Final = 60.0
SILENT_S: Final = 5.0
"""Seconds without a sign of life after which the scheduler is named here."""

SILENT_BEATS: Final = 2.0
"""Intervals without a beat after which a node is named here; it is silent after three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One line, and where it leads."""

    level: Literal["bad", "warn"]
    text: str
    link: str = ""
    link_text: str = ""


def notices(document: Document, problem: str = "") -> list[Notice]:
    """Return what needs attention; `problem` says why the scheduler's own figures could not be read, where that is so."""
    return [*_of_scheduler(document, problem), *_of_nodes(document), *_of_jobs(document), *_of_queues(document)]


def _of_scheduler(document: Document, problem: str) -> Iterator[Notice]:
    scheduler = document["scheduler"]
    if problem:
        yield Notice(level="bad", text=f"{problem[0].upper()}{problem[1:]}. Quotas, shares and beats are not known until it can be.")
    elif scheduler is None:
        yield Notice(level="bad", text="No scheduler is active: nothing is granted.")
    elif scheduler.get("shown_ago_s", 0.0) > SILENT_S:
        text = f"The scheduler has not shown itself for {seconds(scheduler['shown_ago_s'])}: it is dead or stuck, and nothing is granted."
        yield Notice(level="bad", text=text, link="/health", link_text="health")
    if document["set_aside"]:
        text = f"{len(document['set_aside'])} messages are set aside: schedulers failed on them."
        yield Notice(level="bad", text=text, link="/health", link_text="health")


def _of_nodes(document: Document) -> Iterator[Notice]:
    scheduler = document["scheduler"] or {}
    # Of what came after the scheduler's figures nothing is known; that they are old is a notice of its own.
    silent_s = scheduler.get("shown_ago_s", 0.0) + SILENT_BEATS * (scheduler.get("beat_s") or math.inf)
    for node in document["nodes"]:
        link, name = address(node["name"], "node"), node["name"]
        if node["state"] == "lost":
            text = f"Node {name} has been lost for {seconds(document['at'] - node['since'])}: {node['reason']}."
            yield Notice(level="bad", text=text, link=link, link_text=name)
        if node["ours"]:
            causes = ", ".join(cause for cause in node["causes"] if cause) or "no cause noted"
            text = f"Node {name} failed {number(node['ours'])} of {number(node['ended'])} actions in the last hour ({causes})."
            yield Notice(level="bad", text=text, link=link, link_text=name)
        if (node["beat_ago_s"] or 0.0) > silent_s:
            silent = " It is silent: nothing begins there, and what it holds waits for it." if node["state"] == "silent" else ""
            text = f"Node {name} last beat {seconds(node['beat_ago_s'])} ago.{silent}"
            yield Notice(level="warn", text=text, link=link, link_text=name)
        if node["draining"] and node["state"] not in ("lost", "left"):
            text = f"Node {name} is {draining(node)}. Nothing new begins there until that is undone."
            yield Notice(level="warn", text=text, link=link, link_text=name)
        if node["isolation"] == "none" and node["state"] not in ("lost", "left"):
            text = f"Node {name} runs commands without isolation: they see its files, its processes and each other, and share /tmp."
            yield Notice(level="warn", text=text, link=link, link_text=name)


def _of_jobs(document: Document) -> Iterator[Notice]:
    for job in document["jobs"]:
        if job["ours"]:
            causes = ", ".join(f"{number(count)} × {cause or 'no cause noted'}" for cause, count in job["causes"].items())
            lost = f"Job {job['name']} lost {number(job['ours'])} of {number(job['ended'])} actions to our failures in the last hour"
            yield Notice(level="bad", text=f"{lost}: {causes}.", link=address(job["name"], "job"), link_text=job["name"])


def _of_queues(document: Document) -> Iterator[Notice]:
    for group in document["queue"]:
        if group["oldest_s"] > LONG_WAIT_S:
            text = (
                f"{group['kind']} of job {group['job']}: the oldest of {number(group['waiting'])} has waited {seconds(group['oldest_s'])}."
            )
            query = urlencode({"job": group["job"], "kind": group["kind"]})
            yield Notice(level="warn", text=text, link=f"/oldest?{query}", link_text="why")
    for quota in document["quotas"]:
        if quota["throttle"] != "open":
            text = f"Quota {quota['name']} is {quota['throttle']}: its API has refused requests."
            yield Notice(level="warn", text=text, link=f"/actions?{urlencode({'state': 'active', 'kind': 'api.call'})}", link_text="calls")
