"""The shape of the project itself: layers, the pages that are written from code."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from app.gateway import ends_page
from app.settings_page import page
from scheduler.model.lifecycle import SERVICE
from tangram.ends import CAUSES, FAULTS
from tangram.errors import BY_STATUS

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("tangram", "scheduler", "app", "workers")
BESIDE = ("bench", "examples", "migrations", "tests")


@cache
def read(path: Path) -> tuple[set[str], list[tuple[str, str]], set[str]]:
    """Return what a module imports, the names that it takes from each module, and the names that it defines or imports."""
    imports, taken, defines = set[str](), list[tuple[str, str]](), set[str]()
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:  # statements alone: `ast.walk` would look at each expression
        node = todo.pop()
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(node, block, ())
        match node:
            case ast.Import():
                imports |= {alias.name for alias in node.names}
                defines |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            case ast.ImportFrom():
                taken += [(node.module, alias.name) for alias in node.names if node.module and not node.level]
                imports |= {f"{node.module}.{alias.name}" for alias in node.names if node.module}
                defines |= {alias.asname or alias.name for alias in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                defines.add(node.name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defines |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return imports, taken, defines


def imported(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in read(path)[0]}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer: str) -> None:
    forbidden = set(LAYERS[LAYERS.index(layer) + 1 :])
    # `tangram.__main__` looks for the server's command line and says so where there is none.
    files = [path for path in (ROOT / layer).rglob("*.py") if path.name != "__main__.py"]
    assert files
    for path in files:
        assert not imported(path) & forbidden, path


FLOORS = ("learning", "model", "quotas choosing", "cpu gpu", "policies", "core", "sim live")
"""The rooms of the scheduler, by floor: each may import what is on the floors below it, and nothing else but itself."""

ROOMS_BEFORE: dict[str, set[str]] = {
    "journal": set(),
    "broker": set(),
    "metrics": set(),
    "gateway": {"journal", "metrics"},
    "local": {"journal", "broker"},
    "replay": {"journal", "broker", "local"},
    "web": {"journal", "metrics"},
    "report": {"journal"},
    "planning": {"journal", "local", "replay"},
    "cli": {"journal", "broker", "gateway", "local", "metrics", "replay", "report", "planning", "web"},
}
"""The rooms of `app`, each with those that it may import from."""


def rooms_imported(path: Path, layer: str) -> set[str]:
    """Return the rooms of a layer that a file imports from."""
    return {name.split(".")[1] for name in read(path)[0] if name.startswith(f"{layer}.")}


@pytest.mark.parametrize("room", " ".join(FLOORS).split())
def test_the_rooms_of_the_scheduler_know_only_those_below(room: str) -> None:
    floor = next(number for number, rooms in enumerate(FLOORS) if room in rooms.split())
    folder = ROOT / "scheduler" / room
    files = list(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert files
    for path in files:
        assert rooms_imported(path, "scheduler") <= {room, *" ".join(FLOORS[:floor]).split()}, path


def test_every_module_of_the_scheduler_is_in_a_room() -> None:
    there = {path.stem for path in (ROOT / "scheduler").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} == set(" ".join(FLOORS).split())


@pytest.mark.parametrize("room", ROOMS_BEFORE)
def test_imports_between_the_rooms_of_app_run_one_way(room: str) -> None:
    assert {path.name for path in (ROOT / "app").iterdir() if (path / "__init__.py").is_file()} == set(ROOMS_BEFORE)
    for path in (ROOT / "app" / room).rglob("*.py"):
        assert rooms_imported(path, "app") & set(ROOMS_BEFORE) <= ROOMS_BEFORE[room] | {room}, path


def test_the_modules_of_app_outside_its_rooms_know_journal_broker_and_metrics_alone() -> None:
    for path in (ROOT / "app").glob("*.py"):
        assert rooms_imported(path, "app") & set(ROOMS_BEFORE) <= {"journal", "broker", "metrics"}, path


def test_only_the_service_of_the_scheduler_knows_time_and_nothing_in_it_knows_celery_or_sql() -> None:
    outside = {"celery", "kombu", "sqlalchemy", "redis", "threading", "asyncio", "socket", "subprocess", "random"}
    for path in (ROOT / "scheduler").rglob("*.py"):
        allowed = {"random"} if path.name == "trace.py" else set()
        assert not imported(path) & (outside - allowed), path
        if path.name not in ("service.py", "simulate.py"):
            assert "time" not in imported(path), path


def test_the_settings_page_is_what_the_settings_say() -> None:
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == page()


def test_the_table_of_causes_is_what_the_code_says_and_every_end_and_fault_has_a_row() -> None:
    text = (ROOT / "docs" / "ends.md").read_text(encoding="utf-8")
    assert f"\n\n{ends_page.table()}\n\n" in text, "print it with `python -m app.gateway.ends_page`"
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert {*BY_STATUS, "succeeded", *FAULTS, *CAUSES} - {""} <= set(rows)


def test_the_page_of_commands_is_what_the_commands_say(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "typer", "app.cli.main", "utils", "docs", "--name", "tangram", "--title", "Commands")
    subprocess.run([*words, "--output", str(tmp_path / "page.md")], cwd=ROOT, check=True, capture_output=True)
    assert (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8") == (tmp_path / "page.md").read_text(encoding="utf-8")


def test_the_life_of_a_service_is_the_same_in_the_page_and_in_the_code() -> None:
    page_of_services = (ROOT / "docs" / "services.md").read_text(encoding="utf-8").split("## Life")[1].split("## ")[0]
    said: dict[str, set[str]] = {}
    for row in (line.strip("| ").split("|") for line in page_of_services.splitlines() if line.startswith("| `")):
        for start in re.findall("`([a-z]+)`", row[0]):
            said.setdefault(start, set()).update(re.findall("`([a-z]+)`", row[1]))
    assert said == {state: SERVICE.after(state) for state in SERVICE.states}


def test_files_hold_one_idea() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 420
    }
    assert long == {}


def test_what_is_imported_from_this_project_exists() -> None:
    """In benchmarks, examples and tests of other systems' clients, which no other test may import. mypy looks at the layers."""
    gone = set()
    for path in (path for folder in ("bench", "examples", "migrations", "tests/clients") for path in (ROOT / folder).rglob("*.py")):
        for name, what in read(path)[1]:
            if name.split(".")[0] in (*LAYERS, *BESIDE):
                module = ROOT / name.replace(".", "/")
                file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                if not (file.exists() and what in read(file)[2]) and not (module / f"{what}.py").exists() and not (module / what).is_dir():
                    gone.add(f"{path.relative_to(ROOT)}: {name}.{what}")
    assert gone == set()


def test_modules_that_docstrings_name_stand_where_they_say() -> None:
    gone = []
    for path in (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        # A bare name is in the folder of the file; a path begins there or in a folder above.
        folders = [folder for folder in path.parents if folder.is_relative_to(ROOT)]
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")):
            if not any((folder / name).exists() for folder in (folders if "/" in name else folders[:1])):
                gone.append(f"{path.relative_to(ROOT)}: {name}")
    assert gone == []


def test_modules_that_pages_name_exist() -> None:
    modules = [f"/{path.relative_to(ROOT)}" for folder in (*LAYERS, *BESIDE) for path in (ROOT / folder).rglob("*.py")]
    gone = []
    for path in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        for name in re.findall(r"`(\w+/[\w/]+\.py)`", path.read_text(encoding="utf-8")):
            if not any(module.endswith(f"/{name}") for module in modules):
                gone.append(f"{path.name}: {name}")
    assert gone == []
