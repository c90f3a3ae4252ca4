"""The matrix as a table, as one JSON document, and as the page `docs/compatibility.md`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.clients.rows import OUTCOMES, Row
from tests.clients.running import Shown

HEAD = """# Compatibility

Which methods of which clients work on a stack. Every row is shown by tests. They run the client itself, unchanged, in an interpreter of
its own. Clients that are not on PyPI, or that need a GPU, are shown by requests as they send them. The stack is installed from the wheels,
which are built first. Tests name the rows that they show; `tests/clients/rows.py` gathers them.

<!-- test: not here, because it builds environments for many minutes: tests/clients -->
```bash
make clients           # builds the environments, once: .venv-clients
make compatibility     # runs all rows and prints them; OUT=docs/compatibility.md writes this page, JSON=1 prints one document
make test-clients      # the same as a test; CLIENTS="agents verifiers" names environments
```

* *works*: the call does what it does at the client's own server.
* *differs*: the call is answered; what it does differs as said.
* *missing*: the call is refused, or has no effect; the reason is given.

CI runs the rows of `project` alone. The other environments take gigabytes and many minutes: run them before a release.
Rows with another environment than `project` run in `.venv-clients/NAME`, whose versions are in `constraints-clients-NAME.txt`, those of
`javascript` in `tests/clients/javascript/package-lock.json`; these need node 20.18 or newer.
Harbor's rows, and one of verifiers, need a Docker engine.
"""


def page(rows: Iterable[Row]) -> str:
    """Return the page: the claims, without the outcome of a run."""
    parts = [HEAD]
    listed = list(rows)
    parts.append("| client | version | environment | " + " | ".join(OUTCOMES) + " |\n|---|---|---|" + "---|" * len(OUTCOMES))
    clients = [(key, list(group)) for key, group in groupby(sorted(listed, key=_client), key=_client)]
    for (client, environment, version), own in clients:
        counts = " | ".join(str(sum(row.outcome == outcome for row in own)) for outcome in OUTCOMES)
        parts.append(f"| {client} | {version} | {environment} | {counts} |")
    for (client, environment, version), own in clients:
        where = "" if environment == "project" else f", in `.venv-clients/{environment}`"
        parts.append(f"\n## {client} {version}{where}\n\n| method | | how |\n|---|---|---|")
        parts += [f"| {_cell(row.method)} | {row.outcome} | {_cell(row.how)} |" for row in own]
    return "\n".join(parts) + "\n"


def document(shown: Sequence[Shown]) -> str:
    """Return all rows as one JSON document."""
    return json.dumps({"rows": [{**asdict(one.row), "state": one.state, "why": one.why} for one in shown]}, indent=1)


def print_table(shown: Sequence[Shown]) -> None:
    """Print all rows, and what was not shown with its reason."""
    table = Table("client", "version", "method", "", "how", "shown")
    for one in shown:
        row = one.row
        state = {"shown": "yes"}.get(one.state, f"{one.state}: {one.why}")
        table.add_row(*(Text(text) for text in (row.client, row.version, row.method, row.outcome, row.how, state)))
    Console(width=None if Console().is_terminal else 200).print(table)


def summary(shown: Sequence[Shown]) -> str:
    """Return one line that counts rows, and one for each that was not shown, reasons that are the same once."""
    lines = []
    for (state, why), group in groupby(sorted((one for one in shown if one.state != "shown"), key=_reason), key=_reason):
        names = [f"{one.row.client} {one.row.method}" for one in group]
        lines.append(f"{state}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {why}")
    counts = [sum(one.state == state for one in shown) for state in ("shown", "failed", "skipped")]
    return "\n".join([*lines, "rows: {} passed, {} failed, {} skipped".format(*counts)])


def _client(row: Row) -> tuple[str, str, str]:
    return row.client, row.environment, row.version


def _reason(shown: Shown) -> tuple[str, str]:
    return shown.state, shown.why


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
