"""What on the first page needs an operator's eye, or did lately: faults first, the newest first, each with the page that tells more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal
from urllib.parse import urlencode

from app.journal.overview import Document
from app.web.formats import SILENT_S, address, counted, draining, number, seconds

LONG_WAIT_S: Final = 60.0
SILENT_BEATS: Final = 2.0
"""Intervals without a beat after which a node is named here; it is silent after three."""

FLOOD_LEAST: Final = 100
FLOOD_OF_EACH: Final = 10
"""Waiting actions of a job from which on it floods, beside other jobs: so many in all, and so many for each core and cell."""

OF_SCHEDULER: Final = ("beat", "quota", "held", "rest")
"""Notices that only a scheduler can find: what they are about begins with one of these words."""

GROWING: Final = ("wait", "flood")
"""Notices of what waits: as long as they are found, it goes on, though the action that waits longest is another one."""

RESOLVED_S: Final = 3600.0
MOST_RESOLVED: Final = 50
"""For how long, and of how many notices at the most, it is said that they are resolved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One line, and where it leads; `last` is absent for what is so now, `since` where that is not known.

    `about` is the same in each look that finds the same thing. `resolved` is when it was found no longer.
    """

    about: str
    level: Literal["bad", "warn"]
    text: str
    link: str = ""
    link_text: str = ""
    since: float | None = None
    last: float | None = None
    resolved: float | None = None

    @property
    def changed(self) -> float | None:
        """When it began, or happened last; what an operator acknowledges later than that is known to them."""
        return self.since if self.last is None else self.last


class Attention:
    """The notices of the latest look, and those of earlier looks that are resolved, the newest first."""

    def __init__(self) -> None:
        self._known: dict[str, Notice] = {}
        self.resolved: tuple[Notice, ...] = ()

    def see(self, found: Sequence[Notice], now: float, *, has_scheduler: bool) -> list[Notice]:
        """Take in what a look has found, and return it, faults first. What goes on since an earlier look has been so since then."""
        present = {notice.about: self._going_on(notice) for notice in found}
        unseen = {} if has_scheduler else {about: one for about, one in self._known.items() if about.startswith(OF_SCHEDULER)}
        goes_on = {**unseen, **present}
        gone = [replace(notice, resolved=now) for about, notice in self._known.items() if about not in goes_on]
        known = {*present, *self._known}
        before = [notice for notice in self.resolved if notice.about not in known and (notice.resolved or 0.0) > now - RESOLVED_S]
        self._known, self.resolved = goes_on, (*gone, *before)[:MOST_RESOLVED]
        return sorted(present.values(), key=_place)

    def _going_on(self, notice: Notice) -> Notice:
        before = self._known.get(notice.about)
        return replace(notice, since=before.since) if before is not None and notice.about.startswith(GROWING) else notice


def notices(document: Document, problem: str = "") -> list[Notice]:
    """Return what needs attention, faults first, then the newest; `problem` says why the scheduler's own figures could not be read."""
    found = [*_of_scheduler(document, problem), *_of_nodes(document), *_of_jobs(document), *_of_clients(document), *_of_queues(document)]
    return sorted(found, key=_place)


def _place(notice: Notice) -> tuple[bool, float]:
    return notice.level != "bad", -(notice.since or math.inf)


def _of_scheduler(document: Document, problem: str) -> Iterator[Notice]:
    scheduler = document["scheduler"]
    if problem:
        yield Notice(
            about="problem", level="bad", text=f"{problem[0].upper()}{problem[1:]}. Quotas, shares and beats are not known until it can be."
        )
    elif scheduler is None:
        yield Notice(about="scheduler", level="bad", text="No scheduler is active: nothing is granted.")
    elif scheduler.get("shown_ago_s", 0.0) > SILENT_S:
        whose = f"The scheduler of shard {scheduler['shard']}" if "shard" in scheduler else "The scheduler"
        text = f"{whose} has not shown itself for {seconds(scheduler['shown_ago_s'])}: it is dead or stuck, and it grants nothing."
        since = document["at"] - scheduler["shown_ago_s"]
        yield Notice(about="scheduler", level="bad", text=text, link="/health", link_text="health", since=since)
    if document["set_aside"]:
        text = f"{len(document['set_aside'])} messages are set aside: schedulers failed on them."
        times = [one["failed_at"] for one in document["set_aside"]]
        yield Notice(about="messages", level="bad", text=text, link="/health", link_text="health", since=min(times), last=max(times))


def _of_nodes(document: Document) -> Iterator[Notice]:
    scheduler = document["scheduler"] or {}
    # Of what came after the scheduler's figures nothing is known; that they are old is a notice of its own.
    silent_s = scheduler.get("shown_ago_s", 0.0) + SILENT_BEATS * (scheduler.get("beat_s") or math.inf)
    for node in document["nodes"]:
        link, name = address(node["name"], "node"), node["name"]
        if node["state"] == "lost":
            text = f"Node {name} has been lost for {seconds(document['at'] - node['since'])}: {node['reason']}."
            yield Notice(about=f"lost {name}", level="bad", text=text, link=link, link_text=name, since=node["since"])
        if node["ours"]:
            causes = ", ".join(cause for cause in node["causes"] if cause) or "no cause noted"
            text = f"Node {name} failed {number(node['ours'])} of {number(node['ended'])} actions in the last hour ({causes})."
            since, last = node["ours_first"], node["ours_last"]
            yield Notice(about=f"failures {name}", level="bad", text=text, link=link, link_text=name, since=since, last=last)
        if (node["beat_ago_s"] or 0.0) > silent_s:
            silent = " It is silent: nothing begins there, and what it holds waits for it." if node["state"] == "silent" else ""
            text = f"Node {name} last beat {seconds(node['beat_ago_s'])} ago.{silent}"
            since = document["at"] - node["beat_ago_s"]
            yield Notice(about=f"beat {name}", level="warn", text=text, link=link, link_text=name, since=since)
        if node["rests_s"]:
            text = f"Node {name} rests for {seconds(node['rests_s'])}: environments could not be opened there, or died there."
            yield Notice(about=f"rest {name}", level="warn", text=text, link=link, link_text=name)
        if node["draining"] and node["state"] not in ("lost", "left"):
            text = f"Node {name} is {draining(node)}. Nothing new begins there until that is undone."
            yield Notice(about=f"draining {name}", level="warn", text=text, link=link, link_text=name)
        if node["isolation"] == "none" and node["state"] not in ("lost", "left"):
            text = f"Node {name} runs commands without isolation: they see its files, its processes and each other, and share /tmp."
            yield Notice(about=f"isolation {name}", level="warn", text=text, link=link, link_text=name, since=node["since"])


def _of_jobs(document: Document) -> Iterator[Notice]:
    units = document["cores"]["total"] + document["cells"]["total"]
    for job in document["jobs"]:
        words = {"link": address(job["name"], "job"), "link_text": job["name"]}
        if job["held_back"]:
            held = job["held_back"]
            why = f"{number(held['ours'])} of {number(held['ended'])} actions failed by our fault within a minute"
            text = f"Job {job['name']} is held back: {why}. {number(held['waiting'])} wait, one is tried in {seconds(held['next_in_s'])}."
            yield Notice(about=f"held {job['name']}", level="bad", text=text, **words, since=document["at"] - held["held_s"])
        if job["ours"]:
            causes = ", ".join(f"{number(count)} × {cause or 'no cause noted'}" for cause, count in job["causes"].items())
            lost = f"Job {job['name']} lost {number(job['ours'])} of {number(job['ended'])} actions to our failures in the last hour"
            first, last = job["ours_first"], job["ours_last"]
            yield Notice(about=f"job {job['name']}", level="bad", text=f"{lost}: {causes}.", **words, since=first, last=last)
        if len(document["jobs"]) > 1 and job["waiting"] >= max(FLOOD_LEAST, FLOOD_OF_EACH * units):
            flood = f"Job {job['name']} floods: {number(job['waiting'])} of {number(document['waiting'])} waiting actions are its own."
            since = document["at"] - max(group["oldest_s"] for group in document["queue"] if group["job"] == job["name"])
            query = urlencode({"state": "waiting", "job": job["name"]})
            about = f"flood {job['name']}"
            yield Notice(about=about, level="warn", text=flood, link=f"/actions?{query}", link_text="its actions", since=since)


def _of_clients(document: Document) -> Iterator[Notice]:
    for one in document["silent"]:
        has = f"Its {counted(one['environments'], 'environment')} in job {one['job']} may be left over."
        text = f"Trainer {one['owner'] or one['client']} has given no sign of life for {seconds(one['silent_s'])}. {has}"
        link = f"/environments?{urlencode({'q': one['client']})}"
        since = document["at"] - one["silent_s"]
        yield Notice(about=f"trainer {one['client']}", level="warn", text=text, link=link, link_text="environments", since=since)


def _of_queues(document: Document) -> Iterator[Notice]:
    for group in document["queue"]:
        if group["oldest_s"] > LONG_WAIT_S:
            text = (
                f"{group['kind']} of job {group['job']}: the oldest of {number(group['waiting'])} has waited {seconds(group['oldest_s'])}."
            )
            query = urlencode({"job": group["job"], "kind": group["kind"]})
            since, about = document["at"] - group["oldest_s"], f"wait {query}"
            yield Notice(about=about, level="warn", text=text, link=f"/oldest?{query}", link_text="why", since=since)
    for quota in document["quotas"]:
        if quota["throttle"] != "open":
            text = f"Quota {quota['name']} is {quota['throttle']}: its API has refused requests."
            link = f"/actions?{urlencode({'state': 'active', 'kind': 'api.call'})}"
            yield Notice(about=f"quota {quota['name']}", level="warn", text=text, link=link, link_text="calls")
