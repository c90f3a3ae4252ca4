"""What an API's answers say of its quota: when it may be asked again, and what an answer cost."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.live.support import Live, ended_calls

pytestmark = pytest.mark.usefixtures("api_node")


def test_tokens_that_answers_name_are_waited_for(live: Live, server: str) -> None:
    with live.client("tests") as client:
        # Given 10 tokens a second, and an answer that cost 20 though none were declared
        began = time.monotonic()
        client.call("llm", url=f"{server}/limited?account=any&tokens=20")
        live.until(lambda: ended_calls(live, "llm"))
        # When the next one comes
        client.call("llm", url=f"{server}/limited?account=any", tokens=1)
        # Then it waits for them, from the end of the first one on
        assert 1.5 < time.monotonic() - began < 40.0


def test_retry_after_may_be_a_date_and_a_post_gets_its_refusal(live: Live, moody: Any) -> None:
    url, seen = moody
    with live.client("tests") as client:
        # Given a POST that is refused with a date two seconds ahead
        assert client.call("dated", method="POST", url=f"{url}/date/1/p").status_code == 429
        live.until(lambda: ended_calls(live, "dated"))
        # When another request of the account comes
        assert client.call("dated", url=f"{url}/date/0/q").status_code == 200
        # Then it has waited for that date, which names whole seconds
        (first,), (second,) = seen.values()
        assert 0.9 < second - first < 40.0
        # And what is idempotent waits itself
        assert client.call("dated", method="POST", url=f"{url}/date/1/r", idempotent=True).status_code == 200


def test_the_cost_of_an_answer_may_be_in_a_header(live: Live, moody: Any) -> None:
    url, _ = moody
    with live.client("tests") as client:
        began = time.monotonic()
        client.call("costly", url=f"{url}/cost/1/a")
        live.until(lambda: ended_calls(live, "costly"))
        client.call("costly", url=f"{url}/cost/0/b", tokens=1)
        assert 1.5 < time.monotonic() - began < 40.0
