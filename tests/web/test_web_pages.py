"""The live page over HTTP: what each address answers, and that nothing of it can be abused."""

from __future__ import annotations

import html
from urllib.parse import quote

import httpx
import pytest

from tests.web.conftest import HOSTILE, LONG, RIGHT_TO_LEFT, SECRET, TOKEN, Trouble

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]


def path_of(name: str, folder: str) -> str:
    return f"/{folder}/{quote(name, safe='')}"


def text_of(trouble: Trouble, path: str) -> str:
    """Return the page as its source has it, entities resolved."""
    answer = trouble.page(path)
    assert answer.status_code == 200, answer.text[:500]
    return html.unescape(answer.text)


@pytest.mark.parametrize(
    ("name", "says", "holders"),
    [
        ("waiter", "in the queue for the cores of node cpu-0", ["holder"]),
        ("behind", "1 earlier one of this session has not ended", ["holder"]),
        ("third-call", "2 of 2 places of quota search are held.", ["call-0", "call-1"]),
        ("lost", "Fault: <strong>ours</strong>", []),
        ("lost", "node cpu-1 was lost", []),
        ("lost", "For the trainer:", []),
    ],
)
def test_an_action_says_why_it_waits_for_whom_and_whose_fault_its_end_was(
    trouble: Trouble, name: str, says: str, holders: list[str]
) -> None:
    page = text_of(trouble, f"/actions/{trouble.handles[name].id}")
    assert says in page
    assert all(f'href="/actions/{trouble.handles[holder].id}"' in page for holder in holders)


def test_the_page_of_a_failed_command_has_its_text_exit_code_and_last_lines_without_secrets(trouble: Trouble) -> None:
    page = text_of(trouble, f"/actions/{trouble.handles['failing'].id}")
    assert "exit 3</bdi>" in page and "Exit code 3." in page
    assert "[variable] [variable]</bdi>" in page and "<bdi><b>last words</bdi>" in page
    assert SECRET not in page and SECRET[::-1] not in page
    assert "<b>last words" not in trouble.page(f"/actions/{trouble.handles['failing'].id}").text
    assert "What it ran" not in text_of(trouble, f"/actions/{trouble.handles['well'].id}")


@pytest.mark.parametrize(
    "path", ["/", "/actions", "/environments", "/health", "/jobs/holder", "/nodes/cpu-0", "/nodes/gpu-0", "/services/judge"]
)
def test_every_page_answers_and_allows_no_script_of_others(trouble: Trouble, path: str) -> None:
    # When
    answer = trouble.page(path)
    # Then
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert " style=" not in answer.text and "onclick" not in answer.text


@pytest.mark.parametrize("name", [HOSTILE, LONG, RIGHT_TO_LEFT])
def test_names_of_users_are_text(trouble: Trouble, name: str) -> None:
    # When
    pages = [trouble.page(path) for path in (path_of(name, "jobs"), f"/actions/{trouble.handles[name].id}", "/", "/environments")]
    # Then
    for page in pages:
        assert page.status_code == 200
        assert HOSTILE not in page.text and "<img src=x" not in page.text
    assert name in html.unescape(pages[0].text)


@pytest.mark.parametrize("path", ["/actions/none", "/jobs/none", "/environments/none", "/services/none", "/nodes/none", "/nothing"])
def test_what_the_journal_does_not_know_is_said_so(trouble: Trouble, path: str) -> None:
    answer = trouble.page(path)
    assert answer.status_code == 404 and "knows nothing at" in answer.text


def test_a_filter_that_makes_no_sense_is_refused(trouble: Trouble) -> None:
    assert trouble.page("/actions?page=-1").status_code == 422
    assert trouble.page(f"/actions?q={'x' * 300}").status_code == 422
    # and in a browser that is a page like all others
    for query in ("page=-1", "hours=soon&page=99999"):
        answer = httpx.get(f"{trouble.url}/actions?{query}", headers={"Accept": "text/html,*/*"}, timeout=30)
        assert answer.status_code == 422 and "Not understood" in answer.text and 'aria-label="Pages"' in answer.text
    assert "<bdi>hours</bdi>" in answer.text and "<bdi>page</bdi>" in answer.text


def test_who_has_no_token_changes_nothing(trouble: Trouble) -> None:
    # When
    path = f"{trouble.url}/actions/{trouble.handles['holder'].id}/cancel"
    wrong = {"Authorization": "Bearer wrong"}
    answers = [httpx.post(path, timeout=30), httpx.post(path, headers=wrong, timeout=30), httpx.get(path, timeout=30)]
    # Then
    assert [answer.status_code for answer in answers] == [401, 401, 404]
    assert trouble.status("holder") == "running"


def test_the_token_closes_an_environment_and_cancels_an_action(trouble: Trouble) -> None:
    # Given
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with trouble.live.client("passing") as client:
        environment = client.open(trajectory="p1")
        handle = environment.submit("echo never", preemptible=False)
        trouble.live.until(lambda: trouble.live.rows(f"SELECT 1 FROM actions WHERE id = '{handle.id}'"))
        # When
        cancelled = httpx.post(f"{trouble.url}/actions/{handle.id}/cancel", headers=headers, timeout=30)
        # Then
        assert cancelled.status_code == 200, cancelled.text
        trouble.live.until(lambda: trouble.live.rows(f"SELECT 1 FROM actions WHERE id = '{handle.id}' AND status = 'cancelled'"))
        assert httpx.post(f"{trouble.url}/actions/{handle.id}/cancel", headers=headers, timeout=30).status_code == 409
        # When
        closed = httpx.post(f"{trouble.url}/environments/{environment.id}/close", headers=headers, timeout=30)
        # Then
        assert closed.status_code == 200, closed.text
        trouble.live.until(lambda: trouble.live.rows(f"SELECT 1 FROM environments WHERE id = '{environment.id}' AND state = 'closed'"))
    assert httpx.post(f"{trouble.url}/actions/none/cancel", headers=headers, timeout=30).status_code == 404


def test_the_token_drains_a_node_and_puts_it_back(trouble: Trouble) -> None:
    # Given
    headers = {"Authorization": f"Bearer {TOKEN}"}

    def post(path: str) -> int:
        return httpx.post(f"{trouble.url}/nodes/{path}", headers=headers, timeout=30).status_code

    def is_so(draining: int) -> bool:
        return bool(trouble.live.rows(f"SELECT 1 FROM nodes WHERE name = 'api-0' AND draining = {draining}"))

    assert httpx.post(f"{trouble.url}/nodes/api-0/drain", timeout=30).status_code == 401
    assert post("none/drain") == 404
    assert post("api-0/undrain") == 409
    # When
    assert post("api-0/drain") == 200
    # Then its page says what is left there, and what waits for it says so
    trouble.live.until(lambda: is_so(1))
    trouble.live.until(lambda: "draining: 2 actions, 0 environments left" in text_of(trouble, "/nodes/api-0"))
    waiting = f"/actions/{trouble.handles['third-call'].id}"  # a page that was asked for before may be as old as the look
    trouble.live.until(lambda: "Node api-0 is draining" in text_of(trouble, waiting))
    assert post("api-0/drain") == 409
    # When
    assert post("api-0/undrain") == 200
    # Then
    trouble.live.until(lambda: is_so(0))
    trouble.live.until(lambda: "drain" not in text_of(trouble, "/nodes/api-0").replace("Drain this node", "").replace("/drain", ""))


def test_a_page_of_this_machine_answers_under_no_other_name(trouble: Trouble) -> None:
    port = trouble.url.rpartition(":")[2]
    codes = {
        name: httpx.get(trouble.url, headers={"Host": name}, timeout=30).status_code
        for name in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", f"site.example:{port}", "127.0.0.1.site.example")
    }
    assert list(codes.values()) == [200, 200, 200, 400, 400], codes


def test_the_timeline_sends_only_what_has_changed(trouble: Trouble) -> None:
    # Given
    whole = trouble.page("/api/timeline").json()
    held = {bar[8]: bar for bar in whole["bars"] if bar[4] is None}
    # Then
    assert whole["whole"] and held[trouble.handles["holder"].id][1:3] == ["cpu-0", [0, 1]]
    # When
    later = trouble.page(f"/api/timeline?since={whole['version']}").json()
    # Then
    assert not later["whole"] and trouble.handles["holder"].id not in {bar[8] for bar in later["bars"]}
