"""What an answer says about limits and costs: `Retry-After`, and the tokens that it has used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from workers.api.requests import Answer

MOST_TOKENS: Final = 1 << 40
"""A larger number in an answer is not a number of tokens."""

LONGEST_RETRY_AFTER_S: Final = 366 * 86_400.0


def refuses(answer: Answer) -> bool:
    """Say whether the server asks for fewer requests: 429, or 503 that says when to come again."""
    return answer.status_code == 429 or (answer.status_code == 503 and retry_after_s(answer.headers) is not None)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that `Retry-After` asks for (RFC 9110, 10.2.3); None if it is missing or makes no sense.

    A date is compared with the answer's own `Date`, since the server's clock need not be ours.
    """
    said = headers.get("retry-after", "").strip()
    if not said:
        return None
    if said.isascii() and said.replace(".", "", 1).isdigit():  # whole seconds by the RFC; some servers send fractions
        return min(float(said), LONGEST_RETRY_AFTER_S)
    until = _date(said)
    if until is None:
        return None
    now = _date(headers.get("date", "")) or datetime.now(UTC)
    return min(max(0.0, (until - now).total_seconds()), LONGEST_RETRY_AFTER_S)


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)


def tokens_used(answer: Answer, usage_header: str | None) -> int | None:
    """Return the tokens that an answer says it cost: in `usage_header`, else as `usage.total_tokens` of a JSON object."""
    if usage_header is not None:
        said = answer.headers.get(usage_header.lower(), "").strip()
        return _tokens(int(said)) if said.isascii() and said.isdigit() and len(said) < 16 else None
    if answer.truncated or b'"total_tokens"' not in answer.body:
        return None
    try:
        document: Any = json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
    usage = document.get("usage") if isinstance(document, dict) else None
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return _tokens(total) if isinstance(total, int) and not isinstance(total, bool) else None


def _tokens(count: int) -> int | None:
    return count if 0 <= count <= MOST_TOKENS else None


def report(answer: Answer, requests: int, usage_header: str | None) -> dict[str, Any]:
    """Return what is reported to the scheduler of an answer (`tangram.wire`)."""
    words: dict[str, Any] = {"status": answer.status_code, "requests": requests}
    for name, value in (("retry_after_s", retry_after_s(answer.headers)), ("tokens", tokens_used(answer, usage_header))):
        if value is not None:
            words[name] = value
    return words
