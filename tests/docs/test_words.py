"""What the pages for newcomers name of the client is there."""

from __future__ import annotations

import re

import pytest

import tangram
from tangram import CallOptions, Client, Environment, ExecOptions, Files, Handle, OpenOptions, ServiceOptions
from tests.docs.snippets import ROOT

OWNERS = {"client": Client, "env": Environment, "env.files": Files, "handle": Handle}
OPTIONS = {name for options in (CallOptions, ExecOptions, OpenOptions, ServiceOptions) for name in options.__annotations__}


def test_what_a_table_translates_into_is_a_word_of_the_client() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    ours = " ".join(row.split(" | ")[1] for row in text.splitlines() if row.startswith("| ") and row.count(" | ") >= 2)
    words = re.findall(r"\b(client|env\.files|env|handle)\.(\w+)\b(?!\.\w)", ours)
    assert len(words) > 40
    assert [f"{owner}.{word}" for owner, word in words if not hasattr(OWNERS[owner], word)] == []
    assert set(re.findall(r"\b(\w+)=(?!=)", ours)) - OPTIONS - {"job", "cores", "on_stdout"} == set()


@pytest.mark.parametrize("page", ["faq.md", "coming-from.md"])
def test_errors_that_a_page_names_can_be_imported(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:Action|Environment|Stack)[A-Z]\w+)`", text))
    assert named and named <= set(tangram.__all__)
