"""The rows of the compatibility matrix.

Tests say which rows they show, by `shows`. The rows of E2B's methods and of recorded requests come from the tables of these tests.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tests.clients.environments import ENVIRONMENTS, ROOT

T = TypeVar("T")
OUTCOMES = ("works", "differs", "missing")
FOLDERS = ("gateway", "integrations", "clients")
"""Where tests say what they show."""
OWN_ENVIRONMENT = {
    **dict.fromkeys(("mini-swe-agent", "harbor", "openai-agents"), "agents"),
    **{"verifiers": "verifiers", "nemo-gym": "nemo-gym", "verl": "training", "trl": "training"},
}
"""The environments of clients that cannot share the project's."""
NOT_INSTALLED = {"rl-rock": "1.11.0", "tangram-docker": "of this project"}
"""The versions of clients that no environment has."""
REAL_TRL = {
    "VLLMClient.check_server",
    "VLLMClient.__init__: /v1/models",
    "VLLMClient.get_sequence_logprobs(top_logprobs=1)",
    "VLLMClient.get_sequence_logprobs(top_logprobs=8)",
    "VLLMClient.get_sequence_logprobs(top_logprobs=129)",
    "async_distillation._score_with_teacher(teacher_top_k=1)",
    "async_distillation._score_with_teacher(teacher_top_k=8)",
}
"""What TRL's own client is made to call; the rest of its rows are requests as it sends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claim about a method of a client, and the tests that show it."""

    client: str
    version: str
    method: str
    outcome: str
    how: str = ""
    """What differs, why it is missing, or what is worth knowing though it works."""
    environment: str = "project"
    tests: tuple[str, ...]
    """The ids of pytest nodes."""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES or not self.tests or (self.outcome != "works" and not self.how):
            raise ValueError(f"{self.client} {self.method}: {self.outcome!r} with {self.how!r} and {len(self.tests)} tests is no row")


def shows(client: str, method: str, how: str = "works") -> Callable[[T], T]:
    """Mark a test as one that shows a row. Where several show one, the first says how the method goes."""
    return lambda test: test


def said(how: str) -> dict[str, str]:
    """Split what a table says, such as `works; with a note`, `differs: …` or `refused: …`, into the fields of a row."""
    if how.startswith("works"):
        return {"outcome": "works", "how": how.removeprefix("works").lstrip(":;, ")}
    if how.startswith("differs: "):
        return {"outcome": "differs", "how": how.removeprefix("differs: ")}
    return {"outcome": "missing", "how": how}


def rows() -> list[Row]:
    """Return all rows, those of a client together."""
    return sorted([*_of_tables(), *_of_tests()], key=lambda row: row.client)


def _of_tests() -> Iterator[Row]:
    """Read the rows of tests from their source, since most of their clients are not installed here."""
    ways: dict[tuple[str, str], str] = {}
    tests: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in (path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))):
        found = ast.parse(path.read_text(encoding="utf-8")).body
        for test in (one for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)):
            for decorator in test.decorator_list:
                if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "shows":
                    client, method, *how = map(ast.literal_eval, decorator.args)
                    ways.setdefault((client, method), *how or ("works",))
                    tests[client, method].append(f"{path.relative_to(ROOT)}::{test.name}")
    for (client, method), how_it_goes in ways.items():
        environment = OWN_ENVIRONMENT.get(client, "project")
        version = NOT_INSTALLED.get(client) or ENVIRONMENTS[environment].version(client)
        words = {"client": client, "version": version, "method": method, "environment": environment}
        yield Row(**words, **said(how_it_goes), tests=tuple(tests[client, method]))


def _of_tables() -> Iterator[Row]:
    from tests.clients.e2b_git import CHECKS
    from tests.clients.test_e2b_javascript import HOW, NAME
    from tests.gateway import e2b_methods, score_methods

    for method in CHECKS:
        shown = (f"tests/gateway/test_gateway_e2b_methods.py::test_row[{method}]",)
        yield Row(client="e2b", version=ENVIRONMENTS["project"].version("e2b"), method=method, **said(e2b_methods.how(method)), tests=shown)
    for methods, how in HOW.items():
        shown = (f"tests/clients/test_e2b_javascript.py::test_row[{methods}]",)
        version = ENVIRONMENTS[NAME].version("e2b")
        yield Row(client="e2b (npm)", version=version, method=methods, **said(how), environment=NAME, tests=shown)
    for call in score_methods.METHODS:
        version, environment = call.version, "project"
        test = f"test_gateway_scores.py::test_recorded_requests_are_answered_as_their_client_reads_it[{call.name}]"
        if not call.path:
            test = f"test_gateway_scores.py::test_a_path_that_is_not_served_is_not_found[{call.name}]"
        elif call.client == "trl" and call.method in REAL_TRL:
            environment, test = "training", "test_gateway_scores.py::test_trls_own_client_reads_a_teacher"
            version = ENVIRONMENTS[environment].version("trl")
        words = {"client": call.client, "version": version, "method": call.method, "environment": environment}
        yield Row(**words, **said(call.how), tests=(f"tests/gateway/{test}",))


def nodes_of(chosen: Iterable[Row]) -> list[str]:
    """Return the tests of some rows, each once, those of a file together."""
    return sorted({test for row in chosen for test in row.tests})
