"""The table of isolations: what its probes find, and its page."""

from __future__ import annotations

from pathlib import Path

from bench.isolation import ISOLATIONS, PROBES, measure, table
from tests.needed import needed
from workers.cpu.errors import SessionUnavailable
from workers.cpu.process.users import find_users

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "isolation.md"
OF_THE_MACHINE = {name for name in PROBES if name.startswith(("memory", "at most", "inotify"))}
"""What without isolation is taken from the whole machine."""


def test_probes_get_through_where_nothing_sets_them_apart() -> None:
    # Given no isolation; when programs try; then they get through, but for what an ordinary user, or one in a container, may not do anyhow
    held = {name for name, holds in measure("none", set(PROBES) - OF_THE_MACHINE).items() if holds}
    of_the_user = {"setuid programs", "capabilities", "folders of the system, which are not written to"}
    assert held <= of_the_user | {"new user namespaces", "system calls are filtered"}


def test_the_row_of_what_is_counted_by_user_says_whether_the_worker_may_choose_users() -> None:
    # Given a view; when everything is tried that does not depend on control groups; then the one row depends on the worker's rights
    try:
        held = measure("view", set(PROBES) - {"memory is held to `memory_mb`"})
    except SessionUnavailable as error:
        needed(str(error))
    shared = {name for name, holds in held.items() if not holds}
    assert shared == (set() if find_users() else {"inotify instances, where another environment takes all"})


def test_the_page_has_the_rows_of_the_command() -> None:
    lines = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert lines[1:] == ["---", *ISOLATIONS.values(), *PROBES]


def test_what_was_not_tried_is_no_verdict() -> None:
    (held, missed) = ("capabilities", "setuid programs")
    rows = table({"`view`, root": {held: True, missed: False}}).splitlines()
    assert f"| {held} | holds |" in rows and f"| {missed} | does not hold |" in rows and f"| {next(iter(PROBES))} |  |" in rows
