"""Reading scripted rollouts and their starting files."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.replay.scripts import read_script, starting_files
from app.replay.trace_lines import TraceError

SCRIPT = """
trajectory = "t"
files = "files"
header = "services.toml"
[[steps]]
think_s = 1.5
[steps.action]
kind = "cpu.exec"
command = "true"
[[steps]]
[[steps.actions]]
kind = "gpu.score"
service = "rm"
work_s = 0.1
items = [{prompt = "p", response = "r"}]
[[steps.actions]]
kind = "cpu.write_file"
path = "a"
text = "b"
"""


def script(folder: Path, text: str = SCRIPT) -> Path:
    (folder / "files").mkdir(exist_ok=True)
    (folder / "services.toml").write_text("[services.rm]\ncells = 1\nmemory_mb = 10\n[quotas.q]\nrate_per_s = 1\nconcurrency = 1\n")
    path = folder / "t.toml"
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_script(path)
    said = str(caught.value)
    assert said.isprintable()
    assert said.startswith(str(path.parent))
    return said


def test_a_script_is_a_trajectory_whose_commands_have_no_time_yet(tmp_path: Path) -> None:
    read = read_script(script(tmp_path))
    assert read.files == tmp_path / "files"
    assert sorted(read.header.services) == ["rm"]
    assert [[(action.kind, action.work_s) for action in step.actions] for step in read.trajectory.steps] == [
        [("cpu.exec", 0.0)],
        [("gpu.score", 0.1), ("cpu.write_file", 0.0)],
    ]
    assert "files" not in read.trajectory.extra


WRONG = {
    ('"true"', "nothing"): "t.toml: not TOML",
    ('"true"', "2026-11-20"): "t.toml: holds a date",
    ("1.5", "nan"): "t.toml: holds a date or a number",
    ("1.5", "-1.5"): "t.toml: steps[0].think_s: should be greater than or equal to 0",
    ('command = "true"', ""): "t.toml: steps[0].action.command: is missing",
    ("work_s = 0.1", ""): "t.toml: steps[1].actions[0].work_s: is missing",
    ('items = [{prompt = "p", response = "r"}]', ""): "t.toml: steps[1].actions[0].items: is missing",
    ('text = "b"', ""): "t.toml: steps[1].actions[1].text: is missing",
    ('kind = "cpu.write_file"', 'kind = "cpu.request"'): "t.toml: steps[1].actions[1].kind: cpu.request cannot be recorded",
    ('text = "b"', "text = 1"): "t.toml: steps[1].actions[1].text: must be a text",
    ('"services.toml"', '"elsewhere.toml"'): "elsewhere.toml: cannot be read: no such file",
    ('"services.toml"', "3"): "t.toml: header: must be a path",
    ('files = "files"', 'files = "elsewhere"'): "t.toml: files: no folder at",
    ('"rm"', '"nobody"'): "t.toml: steps[1].actions[0].service: 'nobody' is not among",
}


@pytest.mark.parametrize("change", WRONG, ids=WRONG.values())
def test_a_wrong_script_is_refused_by_its_key(change: tuple[str, str], tmp_path: Path) -> None:
    old, new = change
    assert old in SCRIPT
    assert WRONG[change] in refusal(script(tmp_path, SCRIPT.replace(old, new, 1)))


def test_a_script_with_steps_of_another_shape_is_refused(tmp_path: Path) -> None:
    assert "steps: should be a valid array" in refusal(script(tmp_path, 'trajectory = "t"\nsteps = 3\n'))


def test_starting_files_are_plain_visible_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", ".git/x", "a/__pycache__/x.pyc", "a/.hidden"):
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "files" / "link").symlink_to("/etc/passwd")
    assert list(starting_files(tmp_path / "files")) == [("a/c.txt", b"a/c.txt"), ("b.txt", b"b.txt")]


def test_too_many_starting_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.replay.scripts.LARGEST_FILES_BYTES", 10)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(TraceError, match="exceed 10 bytes"):
        list(starting_files(tmp_path))


def test_a_missing_folder_of_starting_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such folder"):
        list(starting_files(tmp_path / "nowhere"))
