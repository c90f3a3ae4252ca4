"""What pages name is there: options of the client with an example, its words and errors, and messages of the program."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import tangram
from tangram import CallOptions, Client, Environment, ExecOptions, Files, Handle, Limits, OpenOptions, ServiceOptions
from tests.docs.snippets import ROOT

REFERENCE = (ROOT / "docs" / "reference" / "client.md").read_text(encoding="utf-8")
OWNERS = {"client": Client, "env": Environment, "env.files": Files, "handle": Handle}
OPTIONS = {name for options in (CallOptions, ExecOptions, OpenOptions, ServiceOptions) for name in options.__annotations__}
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [row for row in re.findall(r"^\| `([^`]*)`[^|]*\|", TROUBLES, re.M) if " " in row]
SOURCES = "\n".join(
    path.read_text(encoding="utf-8") for room in ("tangram", "scheduler", "app", "workers") for path in (ROOT / room).rglob("*.py")
)


def rows(heading: str) -> Iterator[tuple[list[str], str]]:
    """Yield the options and the example of each row of a table."""
    text = REFERENCE.split(f"\n### {heading}\n")[1].split("\n### ")[0]
    for row in re.findall(r"^\| (`.*)$", text, re.M):
        names, example = row.split(" | ")[:2]
        yield re.findall(r"`(\w+)`", names), example


@pytest.mark.parametrize(
    ("heading", "options", "method"),
    [
        ("Every action", Limits, None),
        ("`client.open`", OpenOptions, Client.open),
        ("`env.exec` and `env.submit`", ExecOptions, Environment.exec),
        ("`client.score`, `client.logprobs` and `client.generate`", ServiceOptions, Client.generate),
        ("`client.call`", CallOptions, Client.call),
    ],
)
def test_each_option_is_there_with_an_example(heading: str, options: type, method: object) -> None:
    own = set(options.__annotations__) - (set(Limits.__annotations__) if method is not None else set())
    given = (
        {name for name, parameter in inspect.signature(method).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
        if method
        else set()
    )  # type: ignore[arg-type]
    found = list(rows(heading))
    assert {name for names, _ in found for name in names} - {"top_k"} == (own | given) - {"variables"}
    assert all(any(f"`{name}=" in example for name in names) for names, example in found)


def test_what_types_a_program_needs_can_be_imported() -> None:
    shown = re.findall(r"^::: tangram\.(\w+)$", REFERENCE, re.M)
    assert {name for name in shown if name[0].isupper()} <= set(tangram.__all__)
    assert all(getattr(tangram, name).__name__ == name for name in tangram.__all__)
    assert {"ExecOptions", "OpenOptions", "ServiceOptions", "CallOptions", "Limits", "Files", "FileInfo"} <= set(shown)


def test_modules_are_there_without_an_import_of_their_own() -> None:
    program = "import tangram; print(tangram.errors.TangramError.__name__, tangram.client.Client.__name__)"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "TangramError Client\n"


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


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 10


@pytest.mark.parametrize("message", MESSAGES)
def test_the_program_says_so(message: str) -> None:
    for fragment in filter(None, (part.strip() for part in message.split("…"))):
        assert fragment in SOURCES, fragment


def test_the_errors_of_the_page_of_the_client_are_where_it_says() -> None:
    table = (ROOT / "docs" / "client.md").read_text(encoding="utf-8").split("\n## Errors\n")[1].split("\n\n**")[0]
    names = re.findall(r"^\| `(\w+)`", table, re.M)
    assert len(names) > 10 and [name for name in names if not hasattr(tangram.errors, name)] == []
