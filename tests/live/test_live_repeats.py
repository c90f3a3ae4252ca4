"""Requests that fail for a moment: which of them a worker repeats, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from tangram import Client

pytestmark = pytest.mark.usefixtures("api_node")


@pytest.mark.parametrize("kind", ["502", "503", "504", "broken"])
def test_what_passes_is_repeated_by_the_worker_for_idempotent_requests_only(client: Client, moody: Any, kind: str) -> None:
    url, seen = moody
    # Given servers that fail twice
    assert client.call("search", url=f"{url}/{kind}/2/a").status_code == 200
    # When the request may not be repeated, then it is not
    if kind == "broken":
        with pytest.raises(Exception, match="POST"):
            client.call("search", method="POST", url=f"{url}/{kind}/2/b")
    else:
        assert client.call("search", method="POST", url=f"{url}/{kind}/2/b").status_code == int(kind)
    assert [len(times) for times in seen.values()] == [3, 1]


def test_an_answer_that_never_passes_is_the_trainers(client: Client, moody: Any) -> None:
    url, seen = moody
    assert client.call("search", url=f"{url}/502/99/x").status_code == 502
    (times,) = seen.values()
    assert len(times) == 3


def test_repeats_end_with_the_actions_timeout(client: Client, moody: Any) -> None:
    url, _ = moody
    with pytest.raises(Exception, match="no answer within"):
        client.call("search", url=f"{url}/502/99/y", timeout_s=0.05)
