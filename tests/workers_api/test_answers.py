"""What a worker reads out of an answer: when to come again, and what it cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.api.limits import refuses, report, retry_after_s, tokens_used
from workers.api.requests import Answer

DATE = "Sat, 21 Nov 2026 21:00:00 GMT"


def answer(status: int = 200, body: bytes = b"", truncated: bool = False, **headers: str) -> Answer:
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body, truncated)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "9" * 400}, 366 * 86_400.0),
        ({"retry-after": "Sat, 21 Nov 2026 21:00:07 GMT", "date": DATE}, 7.0),
        ({"retry-after": "Sat, 21 Nov 2026 20:00:00 GMT", "date": DATE}, 0.0),
        ({"retry-after": "Sat Nov 21 21:00:02 2026", "date": DATE}, 2.0),
    ],
)
def test_retry_after_is_seconds_or_a_date_on_the_servers_clock(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_header_is_seconds_or_nothing(said: str, date: str) -> None:
    found = retry_after_s({"retry-after": said, "date": date})
    assert found is None or 0.0 <= found < 1e9


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"usage": {"total_tokens": 42}}', 42),
        (b'{"usage": {"total_tokens": true}}', None),
        (b'{"usage": {"total_tokens": -1}}', None),
        (b'{"usage": {"total_tokens": 1e9}}', None),
        (b'{"usage": "total_tokens"}', None),
        (b'{"usage": {"total_tokens": 4', None),
        (b"[" * 100_000 + b'"total_tokens"', None),
        (b'["total_tokens"]', None),
        (b"", None),
    ],
)
def test_tokens_are_those_of_an_answer_like_openais(body: bytes, tokens: int | None) -> None:
    assert tokens_used(answer(body=body), None) == tokens


def test_tokens_of_a_declared_header_come_first_and_half_an_answer_says_nothing() -> None:
    said = b'{"usage": {"total_tokens": 42}}'
    found = answer(body=said, x_cost="7")
    assert (tokens_used(found, "X-Cost"), tokens_used(found, "X-Other"), tokens_used(answer(x_cost="many"), "x-cost")) == (7, None, None)
    assert tokens_used(answer(body=said, truncated=True), None) is None


@pytest.mark.parametrize(
    ("status", "headers", "refused"), [(429, {}, True), (503, {}, False), (503, {"retry_after": "1"}, True), (200, {}, False)]
)
def test_what_refuses(status: int, headers: dict[str, Any], refused: bool) -> None:
    assert refuses(answer(status, **headers)) == refused


def test_a_report_says_only_what_the_answer_says() -> None:
    assert report(answer(200), 1, None) == {"status": 200, "requests": 1}
    whole = {"status": 429, "requests": 3, "retry_after_s": 2.0, "tokens": 5}
    assert report(answer(429, retry_after="2", x_cost="5"), 3, "x-cost") == whole
