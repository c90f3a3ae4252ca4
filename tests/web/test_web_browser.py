"""The live page in a real browser: questions answered by clicks, at both widths, light and dark; axe; a page that stays live."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime

import pytest

from tests.web.conftest import HOSTILE, Trouble
from tests.web.journals import TOKEN

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the extra `web` is not installed")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from app.web.pages import make_templates
from app.web.shared_looks import Look

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]

# What a page shows comes with its next look, which takes longer on a busy machine.
expect.set_options(timeout=30_000)

WIDTHS = {"phone": (375, 812), "desk": (1440, 900)}
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"], "resultTypes": ["violations"]}
COLOURS = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}


@contextmanager
def shown(browser: Browser, trouble: Trouble, width: str) -> Iterator[Page]:
    """A page of one width; whatever a script throws fails the test."""
    across, down = WIDTHS[width]
    with browser.new_context(base_url=trouble.url, viewport={"width": across, "height": down}, color_scheme="light") as context:
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Content Security Policy" in message.text else None)
        yield page
    assert errors == []


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, browser: Browser, trouble: Trouble) -> Iterator[Page]:
    """A page at each width, for what is laid out otherwise on a phone."""
    with shown(browser, trouble, request.param) as page:
        yield page


@pytest.fixture
def phone(browser: Browser, trouble: Trouble) -> Iterator[Page]:
    """A page of the narrower width, for what scripts and the server do at any width."""
    with shown(browser, trouble, "phone") as page:
        yield page


def test_why_does_this_action_wait_and_who_holds_what_it_needs(phone: Page, trouble: Trouble) -> None:
    # Given an operator on the first page
    phone.goto("/")
    # When they go to what waits of the job, and to the action
    row = phone.get_by_role("region", name="Waiting actions by job and kind").get_by_role("row").filter(has_text="waiter")
    row.get_by_role("link", name="cpu.exec").click()
    phone.get_by_role("link", name=trouble.handles["waiter"].id).click()
    # Then the page says why, and leads to the holder
    expect(phone.get_by_role("heading", name="Why it waits")).to_be_visible()
    expect(phone.get_by_text("2 of 2 are held")).to_be_visible()
    phone.locator(".holders").get_by_role("link", name=trouble.handles["holder"].id).first.click()
    expect(phone.get_by_role("heading", level=1)).to_have_text(trouble.handles["holder"].id)


def test_what_is_acknowledged_is_folded_away_in_this_browser_until_it_is_asked_for(phone: Page, trouble: Trouble) -> None:
    phone.goto("/")
    notice = phone.get_by_role("listitem").filter(has_text="Job unlucky lost 1 of")
    # When it is acknowledged; then it is gone, on other pages and after later looks, too
    notice.get_by_role("button", name="Acknowledge").click()
    for path in ("/", "/health"):
        phone.goto(path)
        phone.evaluate("new Promise((done) => document.addEventListener('tangram-look', done, { once: true }))")
        expect(phone.get_by_text("1 acknowledged in this browser.")).to_be_visible()
        expect(notice).to_be_hidden()
    # And it is there again once somebody asks
    phone.get_by_role("button", name="Show again").click()
    expect(notice).to_be_visible()


def test_what_is_acknowledged_leaves_its_place_to_the_next(phone: Page, trouble: Trouble) -> None:
    # Given a page with room for one notice, and more of them
    phone.add_init_script("document.addEventListener('tangram-look', () => { document.querySelector('.notices').dataset.most = 1; })")
    phone.goto("/")
    notices = phone.locator(".notices > li").locator("visible=true")
    expect(notices).to_have_count(1)
    first = notices.get_attribute("data-key")
    notices.get_by_role("button", name="Acknowledge").click()
    expect(notices).to_have_count(1)
    assert notices.get_attribute("data-key") != first


def test_a_list_of_lost_actions_tells_them_apart_and_says_why(page: Page, trouble: Trouble) -> None:
    page.goto("/actions?fault=infrastructure")
    lost = page.get_by_role("link", name=trouble.handles["lost"].id)
    expect(lost).to_be_visible()
    # at any width the end of an id is to be seen, in which ids differ
    assert lost.evaluate("link => link.firstChild.getBoundingClientRect().right <= link.getBoundingClientRect().right + 1")
    reason = page.get_by_text("node cpu-1 was lost").locator("visible=true")
    expect(reason).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_names_of_users_do_nothing_in_the_browser(page: Page, trouble: Trouble) -> None:
    for path in ("/", "/environments", f"/actions/{trouble.handles[HOSTILE].id}"):
        page.goto(path)
        expect(page.locator("#live-text")).to_have_text("live")
        assert "owned" not in page.title()
        assert page.locator("main img, main script").count() == 0
        # nothing is wider than the window
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_stays_live_and_can_be_paused(phone: Page, trouble: Trouble) -> None:
    phone.goto("/actions?state=waiting&job=fresh")
    expect(phone.get_by_text("None.")).to_be_visible()
    with trouble.live.client("fresh") as client:
        environment = client.open(trajectory="f1")
        handle = environment.submit("true", preemptible=False)
        expect(phone.get_by_role("link", name=handle.id)).to_be_visible(timeout=30_000)
        phone.get_by_role("button", name="Pause").click()
        handle.cancel()
        trouble.live.until(lambda: trouble.live.rows(f"SELECT 1 FROM actions WHERE id = '{handle.id}' AND status = 'cancelled'"))
        # Then it stays as it is, until it goes on
        expect(phone.locator("#live-text")).to_have_text("paused")
        expect(phone.get_by_role("link", name=handle.id)).to_be_visible()
        phone.get_by_role("button", name="Pause").click()
        expect(phone.get_by_role("link", name=handle.id)).to_have_count(0, timeout=30_000)


def test_a_look_that_failed_is_said_and_the_timeline_comes_back_after_it(phone: Page, trouble: Trouble) -> None:
    phone.goto("/")
    bars = phone.locator(".timeline canvas")
    expect(bars).to_have_attribute("data-bars", re.compile("[1-9]"))
    # When the server cannot read the journal at the next looks
    look = Look(version=1, at=0.0, scheduler=None, overview=None)
    words = {"look": look, "now": 0.0, "overview": None, "may_act": False, "problem": "the journal cannot be read", "path": "/"}
    failed = make_templates().get_template("problem.html").render(words)
    phone.route(f"{trouble.url}/", lambda route: route.fulfill(status=503, content_type="text/html", body=failed))
    # Then the page does not call itself live
    expect(phone.get_by_role("heading", name="The deployment cannot be read")).to_be_visible()
    expect(phone.locator("#live-text")).to_have_text("cannot be read")
    assert phone.locator("#live-dot.on").count() == 0
    # When it can be read again, all is back without a hand
    phone.unroute(f"{trouble.url}/")
    expect(bars).to_have_attribute("data-bars", re.compile("[1-9]"), timeout=30_000)
    expect(phone.locator("#live-text")).to_have_text("live")


def test_a_page_of_an_old_look_says_how_old_it_is(phone: Page, trouble: Trouble) -> None:
    # Given a server whose last look is a minute old when it is asked
    late_s = 60

    def late(route: Route) -> None:
        answer = route.fetch()
        date = format_datetime(parsedate_to_datetime(answer.headers["date"]) + timedelta(seconds=late_s), usegmt=True)
        route.fulfill(response=answer, headers={**answer.headers, "date": date})

    phone.route(f"{trouble.url}/health", late)
    phone.goto("/health")
    # Then it says so, but for the second that a date of whole seconds may lack, and with the age of the look
    expect(phone.locator("#live-text")).to_have_text(re.compile(r"as of (59|[67]\d) s ago"))
    assert phone.locator("#live-dot.on").count() == 0
    late_s = 0
    expect(phone.locator("#live-text")).to_have_text("live")
    phone.unroute_all(behavior="wait")


def test_tabs_in_the_background_leave_connections_for_others_and_catch_up(phone: Page, trouble: Trouble) -> None:
    # Given more tabs than a browser has connections for one server, each of them hidden once it was live
    tabs = [phone, *(phone.context.new_page() for _ in range(6))]
    for tab in tabs:
        tab.goto("/actions?state=waiting&job=tabs")
        expect(tab.locator("#live-text")).to_have_text("live")
        _show(tab, False)
    with trouble.live.client("tabs") as client:
        handle = client.open(trajectory="f1").submit("true", preemptible=False)
        # Then the tab that is looked at again shows it
        _show(phone, True)
        expect(phone.get_by_role("link", name=handle.id)).to_be_visible(timeout=30_000)
        expect(phone.locator("#live-text")).to_have_text("live")
        handle.cancel()


def _show(tab: Page, shown: bool) -> None:
    """Have a tab believe that it is shown, or hidden. Without a window, browsers show all of their tabs."""
    tab.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        not shown,
    )


def test_a_cancel_asks_once_for_the_token_and_whether_it_is_meant(phone: Page, trouble: Trouble) -> None:
    with trouble.live.client("regret") as client:
        environment = client.open(trajectory="r1")
        handle = environment.submit("true", preemptible=False)
        trouble.live.until(lambda: trouble.live.rows(f"SELECT 1 FROM actions WHERE id = '{handle.id}'"))
        phone.goto(f"/actions/{handle.id}")
        phone.get_by_role("button", name="Cancel this action").click()
        # Then it is asked once whether this action is meant, with the token; Back leaves all as it is
        expect(phone.get_by_role("dialog", name="Cancel this action?")).to_contain_text(handle.id)
        phone.get_by_role("button", name="Back").click()
        expect(phone.get_by_role("dialog")).to_have_count(0)
        # and a token that no browser can send is wrong
        phone.get_by_role("button", name="Cancel this action").click()
        phone.locator("#token-text").fill("ключ-ключ-ключ-ключ")
        phone.locator("#token-text").press("Enter")
        expect(phone.locator("#said")).to_have_text("the token is wrong")
        phone.get_by_role("button", name="Cancel this action").click()
        phone.locator("#token-text").fill(TOKEN)
        phone.locator("#token-text").press("Enter")
        expect(phone.locator("#said")).to_have_text("the cancel is on its way")
        trouble.live.until(lambda: trouble.live.rows(f"SELECT 1 FROM actions WHERE id = '{handle.id}' AND status = 'cancelled'"))
        expect(phone.locator(".lead .state")).to_have_text("cancelled", timeout=30_000)


def test_the_timeline_leads_to_the_action_of_a_bar(page: Page, trouble: Trouble) -> None:
    page.goto("/")
    canvas = page.locator(".timeline canvas")
    expect(canvas).to_have_attribute("data-bars", re.compile("[1-9]"))
    expect(canvas).to_have_attribute("data-draw-ms", re.compile("."))
    # When the newest moment of the first core is pressed
    box = canvas.bounding_box()
    assert box is not None
    page.locator(".timeline").click(position={"x": box["width"] - 12, "y": 8})
    expect(page.get_by_role("heading", level=1)).to_have_text(trouble.handles["holder"].id)


def test_a_keyboard_reaches_everything(page: Page, trouble: Trouble) -> None:
    page.goto("/")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent.trim()"))
    assert {"Skip to content", "Tangram", "Actions", "Environments", "Machines", "Health", "Search", "Pause"} <= reached
    assert any(label.startswith("Timeline of nodes") for label in reached)


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        *((name, ("phone", "desk")) for name in ("/", "/actions", "waiter")),
        *(
            (name, ("phone",))
            for name in ("lost", "/jobs/unlucky", "/environments", "/nodes/cpu-1", "/services/judge", "/health", "/machines")
        ),
    ],
)
def test_axe_finds_nothing(browser: Browser, trouble: Trouble, name: str, widths: tuple[str, ...]) -> None:
    path = name if name.startswith("/") else f"/actions/{trouble.handles[name].id}"
    with shown(browser, trouble, widths[0]) as page:
        page.emulate_media(reduced_motion="reduce")  # no colour on its way to another one
        page.goto(path)
        expect(page.locator("#live-text")).to_have_text("live")
        page.get_by_role("button", name="Pause").click()
        for width in widths:
            across, down = WIDTHS[width]
            page.set_viewport_size({"width": across, "height": down})
            light = Axe().run(page, options=RULES)
            assert light.violations_count == 0, light.generate_report()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # and the same page is dark, which changes nothing but colours
        page.emulate_media(color_scheme="dark")
        dark = Axe().run(page, options=COLOURS)
        assert dark.violations_count == 0, dark.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
