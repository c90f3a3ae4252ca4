"""docs/ends.md says of each cause what the table in the code says."""

from __future__ import annotations

import re
from pathlib import Path

from app.gateway.ends_page import table
from tangram.ends import CAUSES, FAULTS
from tangram.errors import BY_STATUS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ends.md").read_text(encoding="utf-8")


def test_the_table_of_causes_is_what_the_code_says() -> None:
    assert f"\n\n{table()}\n\n" in PAGE, "print it with `python -m app.gateway.ends_page`"


def test_every_end_and_every_fault_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert {*BY_STATUS, "succeeded", *FAULTS, *CAUSES} - {""} <= set(rows)
