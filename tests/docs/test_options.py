"""The reference of the client has each option of each call, with an example."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tangram
from tangram import CallOptions, Client, Environment, ExecOptions, Limits, OpenOptions, ServiceOptions

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "client.md"


def rows(heading: str) -> Iterator[tuple[list[str], str]]:
    """Yield the options and the example of each row of a table."""
    text = REFERENCE.read_text(encoding="utf-8").split(f"\n### {heading}\n")[1].split("\n### ")[0]
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
    shown = re.findall(r"^::: tangram\.(\w+)$", REFERENCE.read_text(encoding="utf-8"), re.M)
    assert {name for name in shown if name[0].isupper()} <= set(tangram.__all__)
    assert all(getattr(tangram, name).__name__ == name for name in tangram.__all__)
    assert {"ExecOptions", "OpenOptions", "ServiceOptions", "CallOptions", "Limits", "Files", "FileInfo"} <= set(shown)


def test_modules_are_there_without_an_import_of_their_own() -> None:
    program = "import tangram; print(tangram.errors.TangramError.__name__, tangram.client.Client.__name__)"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "TangramError Client\n"
