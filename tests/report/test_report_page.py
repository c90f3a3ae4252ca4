"""`tangram report -o`: the page, through the command line and in a real browser."""

from __future__ import annotations

import json
import re
import time
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import pytest
from sqlalchemy import event

from app.journal.figures import Selection
from app.journal.retention import DAY_S, Retention
from app.report.subject import holdings, read_subject
from bench.figures.reporting import write_many
from scheduler.live.entries import ActionResized
from tests.cli.forked import forked
from tests.report.conftest import opened
from tests.report.scene import ZERO, Scene, now

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.timeout(600)

MOST_MB = 8


def written(folder: Path, *words: str) -> Path:
    """Write a report, check that it is one file of a sane size, and return its path."""
    done = forked("report", *words, "-o", "report.html", cwd=folder)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    path = folder / "report.html"
    assert done.stderr.startswith("wrote report.html (") and path.stat().st_size < MOST_MB * 1e6
    return path


def figures(path: Path) -> dict[str, dict[str, Any]]:
    """Return the pictures of a page by their keys."""
    found = re.findall(r'<script type="application/json" id="([\w-]+)-figure">(.*?)</script>', path.read_text(encoding="utf-8"))
    return {key: json.loads(text) for key, text in found}


def traces(path: Path, key: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in figures(path)[key]["data"]}


def table(path: Path, caption: str) -> list[str]:
    """Return the rows of a table of a page, with a tab between cells."""
    text = path.read_text(encoding="utf-8")
    body = text[text.index(f"<caption>{caption}") :]
    rows = re.findall(r"<tr>(.*?)</tr>", body[: body.index("</table>")])
    return ["\t".join(map(unescape, re.findall(r"<bdi>(.*?)</bdi>", row))) for row in rows]


def verdict(path: Path) -> str:
    return unescape(re.findall(r'<p class="verdict"><bdi>(.*?)</bdi>', path.read_text(encoding="utf-8"))[0])


def tiles(path: Path) -> dict[str, str]:
    return dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", path.read_text(encoding="utf-8")))


def area(trace: dict[str, Any]) -> float:
    """Return the integral of a line over time: all stretches are equally long."""
    return sum(trace["y"]) * (trace["x"][1] - trace["x"][0])


def filled(scene: Scene) -> Scene:
    """Return a journal with a run of several kinds of actions, in pods, in the background, on cells, of which some failed."""
    scene.node("g1", cells=2, services={"judge": {"cells": [1]}})
    scene.opening(0.0, 1.0, 1.2)
    scene.pod(2, 1.2, 30.0)
    scene.action(2.0, 4.0, 10.0, cores=(0, 1), cpu_s=9.0, action_class="pytest")
    scene.action(3.0, 10.0, 20.0, cores=(2,), cpu_s=4.0, action_class="make", resized=(15.0, (3,)))
    scene.action(3.5, 11.0, 21.0, cores=(2,), resized=(16.0, ()), unit_s=5.0, trajectory="t2", environment="e2")
    scene.action(5.0, 6.0, 9.0, kind="gpu.score", service="judge", environment=None, cost={"cells": [1]}, cores=(), cells=(1,), node="g1")
    scene.action(22.0, 22.0, 23.0, status="failed", cause="disk_limit", reason="its disk is full")
    scene.action(24.0, None, 26.0, status="rejected", cause="queue_full", reason="too many of its job wait")
    scene.run()
    return scene


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of that run."""
    folder = tmp_path_factory.mktemp("busy")
    filled(Scene(folder))
    return written(folder)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of that run beside its job."""
    folder = tmp_path_factory.mktemp("compared")
    filled(Scene(folder))
    return written(folder, "last", "--against", "coding")


def test_the_pictures_are_what_plotly_takes_and_say_how_to_read_them(path: Path) -> None:
    found = figures(path)
    assert {"run-act", "run-kinds", "run-queue", "run-cores", "run-cells", "run-timeline", "run-ends"} <= found.keys()
    for key, figure in found.items():
        drawn = go.Figure(figure)  # raises at what plotly does not know
        axes = [drawn.layout.xaxis, drawn.layout.yaxis]
        assert all(axis.title.text or axis.ticktext for axis in axes), key
    text = path.read_text(encoding="utf-8")
    readings = re.findall(r'<p id="([\w-]+)-reading">([^<]{40,})</p>', text)
    assert {key for key, _ in readings} == found.keys()
    assert text.count("The same in figures") == len(found)


def test_lines_over_time_have_the_seconds_of_the_journal(path: Path) -> None:
    # Waits: 1 of the opening, 2 + 7 + 7.5 of commands, of which one was rejected after 2 s, and 1 of the model
    waiting = traces(path, "run-queue")
    assert area(waiting["cpu.open"]) == pytest.approx(1.0, abs=0.02)
    assert area(waiting["cpu.exec"]) == pytest.approx(2 + 7 + 7.5 + 2, abs=0.05)
    assert area(waiting["gpu.score"]) == pytest.approx(1.0, abs=0.02)
    # Cores: 0.2 of the opening, 12, 10, 5 before it went to the background, and 1
    cores = traces(path, "run-cores")
    assert area(cores["granted to actions"]) == pytest.approx(0.2 + 12 + 10 + 5 + 1, abs=0.1)
    assert area(cores["used by commands"]) == pytest.approx(13.0, abs=0.1)
    assert cores["there"]["y"] == [4, 4]
    assert area(traces(path, "run-cells")["granted to actions"]) == pytest.approx(3.0, abs=0.05)


def test_ends_are_told_by_fault_and_cause(scene: Scene, tmp_path: Path) -> None:
    # Given besides what fails by programs and callers a command that exits with 3, and two actions whose node was lost
    filled(scene).action(40.0, 40.0, 41.0, cause="exit")
    for _ in range(2):
        scene.action(40.0, 40.0, 41.0, status="lost", cause="node_lost", reason="node n1 was lost")
    # And the close of an environment that was lost, which counts for nobody
    scene.closing(42.0, 42.0, status="lost", cause="environment_lost")
    path = written(tmp_path, "coding")
    by_fault = {trace["name"]: trace["x"] for trace in figures(path)["run-ends"]["data"]}
    assert by_fault == {"infrastructure (ours)": [2], "program": [1, 1], "caller": [1]}
    assert "infrastructure (ours)\tnode_lost\tlost\tnode n1 was lost\tcoding\t2\t18.2%" in table(path, "Ends by fault and cause")
    assert verdict(path).endswith("did not succeed, 2 of them by our fault.")
    assert tiles(path)["by our fault"] == "2"


def test_the_timeline_shows_who_held_what(path: Path) -> None:
    rows = figures(path)["run-timeline"]["layout"]["yaxis"]["ticktext"]
    of_n1 = [*(f"n1 core {number}" for number in range(4)), "n1 changed", "n1 changed 2", "n1 background"]
    assert rows == ["g1 cell 0", "g1 cell 1", *of_n1]
    spans = traces(path, "run-timeline")
    drawn = {(rows[row], base, length) for row, base, length in zip(*(spans["cpu.exec"][key] for key in ("y", "base", "x")), strict=True)}
    assert {("n1 core 0", 4.0, 6.0), ("n1 core 1", 4.0, 6.0), ("n1 core 3", 15.0, 5.0), ("n1 background", 16.0, 5.0)} <= drawn
    assert {("n1 changed", 10.0, 5.0), ("n1 changed 2", 11.0, 5.0)} <= drawn


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (375, "dark")])
def test_the_page_opens_in_a_browser_at_any_width(compared: Path, browser: Browser, width: int, scheme: str) -> None:
    with opened(browser, compared, width=width, scheme=scheme) as found:
        # Every picture is drawn, nothing was complained of, and nothing was asked of any other place
        drawn = found.page.evaluate("[...document.querySelectorAll('.picture')].map(place => [place.id, !!place.querySelector('svg')])")
        assert dict(drawn) == dict.fromkeys(figures(compared), True)
        assert (found.complaints, found.requests) == ([], [compared.as_uri()])
        # The page is as wide as the window, and its ground is what was asked for
        assert found.page.evaluate("document.documentElement.scrollWidth") == width
        ground = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        # A keyboard reaches the tables beside the pictures
        summary = found.page.locator("summary").first
        summary.focus()
        found.page.keyboard.press("Enter")
        assert found.page.locator("details table").first.is_visible()
        # And pictures follow when the ground changes
        before = found.page.evaluate(COLOUR)
        found.page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
        wait_for_other(found.page, before)
        assert found.complaints == []


def test_axe_finds_nothing(compared: Path, browser: Browser) -> None:
    from axe_playwright_python.sync_playwright import Axe

    # axe is a script of its own, which the page's policy forbids
    context = browser.new_context(viewport={"width": 375, "height": 900}, color_scheme="light", bypass_csp=True)
    with context:
        page = context.new_page()
        page.goto(compared.as_uri())
        page.wait_for_selector("html[data-drawn]", timeout=120_000)
        found = Axe().run(page).response["violations"]
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
        # And no colour is too pale on the other ground, in the pictures as they are drawn for it
        before = page.evaluate(COLOUR)
        page.emulate_media(color_scheme="dark")
        wait_for_other(page, before)
        found = Axe().run(page, options={"runOnly": ["color-contrast"]}).response["violations"]
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


COLOUR = "getComputedStyle(document.querySelector('.picture .xtitle')).fill"


def wait_for_other(page: Page, before: str) -> None:
    """Wait until pictures are drawn in another colour. The page runs no code but its own, so that Playwright cannot wait inside it."""
    deadline = time.monotonic() + 60
    while page.evaluate(COLOUR) == before and time.monotonic() < deadline:
        page.wait_for_selector("html[data-drawn]")
    assert page.evaluate(COLOUR) != before
    page.wait_for_selector("html[data-drawn]")


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_hostile_names_are_text(scene: Scene, tmp_path: Path, browser: Browser) -> None:
    # Given names that are HTML, a template of plotly, a date and a change of the direction of writing
    scene.action(0.0, 1.0, 2.0, job=HOSTILE, trajectory="%{x}<b>bold</b>", action_class="<a href='javascript:alert(3)'>x</a>")
    scene.action(0.0, 1.0, 3.0, job="2024-01-01", action_class="$\\\\frac{1}{2}$", status="failed", reason=f"\u202e\0{HOSTILE}\nline")
    scene.action(0.0, 1.0, 3.0, job="2024-01-01", kind="my.<i>task</i>", cost={"cores": [1]}, environment=None)
    run = scene.run(policy="<u>policy</u>", jobs=(HOSTILE, "2024-01-01"))
    path = written(tmp_path, run, "--against", "2024-01-01")
    with opened(browser, path) as found:
        assert found.complaints == []
        assert found.page.evaluate("[document.images.length, document.querySelectorAll('main b, main i, main u, svg a').length]") == [0, 0]
        assert found.page.evaluate("[...document.scripts].filter(each => !each.type).length") == 2
        table = found.lines("#run table")
        assert any(HOSTILE in text for text in table) and any("%{x}<b>bold</b>" in text for text in table)
        assert not any("\u202e" in text for text in table)
        # And plotly shows the label as it is, on an axis of rows
        labels = found.page.locator("#run-jobs .yaxislayer-above text").all_text_contents()
        assert any(label.startswith("</script>") for label in labels)
        assert any(label == "2024-01-01" for label in labels)


def test_an_empty_run_says_so_and_a_page_may_go_to_standard_output(scene: Scene, tmp_path: Path) -> None:
    scene.run()
    assert "There is no action of it in the journal." in written(tmp_path).read_text(encoding="utf-8")
    done = forked("report", "-o", "-", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("<!doctype html>") and not (tmp_path / "-").exists()


def test_a_run_in_progress_counts_until_now(scene: Scene, tmp_path: Path) -> None:
    # Given a run without an end, with an action that ended, one that runs and one that waits
    at = now()
    scene.action(at - 30, at - 30, at - 20)
    scene.action(at - 20, at - 20, id="running", cores=(1,))
    scene.action(at - 10, id="waiting")
    scene.run(ended=False)
    path = written(tmp_path)
    # What has not ended counts until the report is made, and making it takes a while.
    took_s = now() - at
    assert 7 <= area(traces(path, "run-queue")["cpu.exec"]) <= 13 + took_s
    assert 27 <= area(traces(path, "run-cores")["granted to actions"]) <= 33 + took_s
    text = path.read_text(encoding="utf-8")
    assert "This run has not ended, or was broken off" in text and "2 actions have not ended" in text
    assert [row.split("\t")[0] for row in table(path, "Not ended yet")[-2:]] == ["running", "waiting"]


def test_memory_declared_stands_beside_what_was_used(scene: Scene, tmp_path: Path) -> None:
    # Given two environments of 512 MB each, of which one held 300 MB at most, the other one 80
    for name, most_mb in (("e1", 300), ("e2", 80)):
        scene.pod(0, 0.5, 30.0, environment=name)
        scene.action(1.0, 1.0, 2.0, environment=name, memory_mb=60, resident_mb=40)
        scene.action(3.0, 3.0, 4.0, environment=name, memory_mb=most_mb, resident_mb=50)
    scene.action(5.0, 5.0, 6.0, environment="e3")
    assert table(written(tmp_path, "coding"), "Memory declared and used")[1:] == ["coding\t2\t512\t45\t190\t289\t300"]


def test_failures_count_after_retention_has_removed_them(scene: Scene, tmp_path: Path) -> None:
    # Given failures by us, by a program and by a caller, of which retention leaves figures, one more by us, and one action that waits
    for at in (0.0, 50 * DAY_S):
        scene.action(at, at, at + 1, status="lost", cause="node_lost")
    scene.action(1.0, 1.0, 2.0, cause="exit")
    scene.action(1.0, None, 2.0, status="rejected", cause="queue_full")
    scene.action(50 * DAY_S)
    assert Retention(scene.engine, keep_days=30, history=0).prune(ZERO + 51 * DAY_S) == 3
    shown = tiles(written(tmp_path, "coding", "--against", "coding"))
    assert (shown["actions"], shown["not succeeded"], shown["by our fault"]) == ("5", "3", "2")
    compared = json.loads(forked("report", "coding", "--against", "coding", "--json", cwd=tmp_path).stdout)["comparison"]
    assert [compared[key]["run"] for key in ("actions", "not_succeeded", "infrastructure")] == [5, 3, 2]


def test_actions_that_come_while_a_job_is_read_are_not_told_as_old_ones(scene: Scene) -> None:
    # Given a job that goes on: an action comes while it is read
    scene.action(0.0, 1.0, 2.0)
    coming = [3.0]

    def come(*rest: Any) -> None:
        if "FROM nodes" in rest[2] and coming:
            scene.action(coming.pop())

    event.listen(scene.engine, "before_cursor_execute", come)
    found = read_subject(scene.engine, "coding", None, Selection(jobs=("coding",)), ZERO + 4.0)
    # Then the report is of before, and all of it
    assert (len(found.history.actions), dict(found.figures.total.by_status), found.rolled_up) == (1, {"succeeded": 1}, 0)
    assert read_subject(scene.engine, "coding", None, Selection(jobs=("coding",)), ZERO + 4.0).figures.total.by_status["waiting"] == 1


def test_what_a_running_action_held_before_its_resize_is_what_is_written(scene: Scene) -> None:
    # Given an action that still runs, which held four cores for 5 s and two for 5 s, and one since
    name = scene.action(0.0, 0.0, cores=(0, 1, 2, 3))
    scene.write(ActionResized(id=name, attempt=1, core_ids=(0,), units=1, background=False, at=ZERO + 10.0, unit_s=30.0))
    # When its report is made 20 s after that
    subject = read_subject(scene.engine, "coding", None, Selection(jobs=("coding",)), ZERO + 30.0)
    # Then it held three on average, then one
    assert [tuple(span) for _, span in holdings(subject, "cores")] == [(ZERO + 10.0, ZERO + 30.0, 1), (ZERO, ZERO + 10.0, 3.0)]
    assert subject.figures.total.core_s_reserved == 0.0, "the sum is that of actions that have ended"


def test_two_runs_of_two_journals_are_compared(scene: Scene, tmp_path: Path) -> None:
    # Given a run whose actions waited 1 s, and in another folder one whose actions waited 3 s
    (tmp_path / "other").mkdir()
    other = Scene(tmp_path / "other")
    for each, policy, wait in ((scene, "elastic", 1.0), (other, "static:1", 3.0)):
        for at in (0.0, 10.0):
            each.action(at, at + wait, at + wait + 1)
        each.run(policy)
    words = ("last", "--against", f"{other.path}:last")
    document = json.loads(forked("report", *words, "--json", cwd=tmp_path).stdout)
    assert document["comparison"]["mean_act"] == {"run": 2.0, "against": 4.0, "ratio": 0.5}
    assert document["comparison"]["by_kind"]["cpu.exec"]["mean_queue"] == {"run": 1.0, "against": 3.0, "ratio": pytest.approx(1 / 3)}
    assert (document["run"]["policy"], document["against"]["run"]["policy"]) == ("elastic", "static:1")
    assert "2.00 × lower" in forked("report", *words, cwd=tmp_path).stdout
    path = written(tmp_path, *words)
    differs = "mean ACT 2.00 × lower, duration 1.17 × lower, core-seconds reserved the same; by our fault 0 against 0 actions."
    assert verdict(path) == f"elastic against static:1: {differs}"
    assert "mean ACT, s\t2.000\t4.000\t2.00 × lower" in table(path, "All actions in the journal")
    text = path.read_text(encoding="utf-8")
    assert "<h1><bdi>elastic against static:1</bdi></h1>" in text
    assert re.findall(r'<section id="([\w-]+)">', text) == ["comparison", "run", "against"]


def test_what_cannot_be_read_is_said_in_a_line(scene: Scene, tmp_path: Path) -> None:
    scene.action(0.0, 1.0, 2.0)
    for words, said in (
        (("report", "last"), "no run and no job 'last'"),
        (("report", "nobody", "-o", "x.html"), "no run and no job 'nobody'"),
        (("report", f"{tmp_path}/nowhere.sqlite:last"), "there is no file"),
        (("report", "coding", "-o", "no/such/place.html"), "no/such/place.html: No such file"),
    ):
        done = forked(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1) and said in done.stderr
    assert not (tmp_path / "x.html").exists()


def test_twenty_thousand_actions_are_summed_up_and_the_page_says_so(scene: Scene, tmp_path: Path, browser: Browser) -> None:
    # Given several times as many as are drawn one by one
    write_many(scene.engine, 20_000)
    path = written(tmp_path, "last")
    # Then the page is hardly larger than plotly: a hundred bytes of each of them would be 2 MB
    assert path.stat().st_size < 5.5e6
    assert figures(path)["run-timeline"]["data"][0]["type"] == "heatmap"
    with opened(browser, path) as found:
        text = found.page.inner_text("#run")
        assert "20,000" in text and "too many to be drawn one by one" in text
        assert found.complaints == []
