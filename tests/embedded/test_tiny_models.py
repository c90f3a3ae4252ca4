"""Making tiny models."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app import tiny_models
from app.services_file import ConfigError, check_models, load_services_file
from app.tiny_models import main, make_services, make_tiny
from tests.lazily import needs

pytestmark = needs("torch", "transformers")

WEIGHTS = "model.safetensors"


def test_a_model_follows_from_its_seed_kind_and_width_and_a_whole_one_is_kept(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "rm", "reward", 1)
    first, words, before = (folder / WEIGHTS).read_bytes(), (folder / "tokenizer.json").read_bytes(), (folder / WEIGHTS).stat()
    # When the same one is made, then it is kept
    make_tiny(folder, "reward", 1)
    after = (folder / WEIGHTS).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    # When it is half gone, or is to be another one, then it is made again
    (folder / WEIGHTS).unlink()
    assert (make_tiny(folder, "reward", 1) / WEIGHTS).read_bytes() == first and (folder / "tokenizer.json").read_bytes() == words
    assert (make_tiny(folder, "reward", 2) / WEIGHTS).read_bytes() != first
    assert (make_tiny(folder, "reward", 1, hidden=128) / WEIGHTS).stat().st_size > 2 * len(first)
    assert "CausalLM" in (make_tiny(folder, "teacher", 1) / "config.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["rm"]


def test_what_was_not_made_here_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(ConfigError, match=f"{name}: is .*left alone"):
            make_tiny(tmp_path / name)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_two_that_make_it_at_once_are_both_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given two that come to put each model in its place at the same moment
    write, one_by_one, together = tiny_models._write_model, threading.Lock(), threading.Barrier(2)

    def write_together(*words: Any) -> None:
        with one_by_one:
            write(*words)
        together.wait(200)

    monkeypatch.setattr(tiny_models, "_write_model", write_together)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make_services, [tmp_path / "models"] * 2))
    # Then both have all of it, and nothing else is left
    assert made == [tmp_path / "models" / "services.toml"] * 2
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["rm-small", "services.toml", "teacher-0"]


def test_the_services_file_names_models_that_are_there_and_is_not_overwritten(tmp_path: Path) -> None:
    models = make_services(tmp_path).parent
    path = models / "services.toml"
    file = load_services_file(path)
    check_models(path, file)
    assert {name: service.task for name, service in file.services.items()} == {"rm-small": "score", "teacher-0": "logprobs"}
    text = path.read_text()
    path.write_text(text + "# mine\n")
    make_services(models)
    assert path.read_text() == text + "# mine\n"


def test_a_bad_folder_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main([str(tmp_path / "file")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "file" in line


def test_a_disk_without_room_for_the_weights_is_one_line_and_exit_2(tmp_path: Path) -> None:
    words = ["bash", "-c", 'ulimit -f 64 && exec "$@"', "limited", sys.executable, "-m", "app.tiny_models", str(tmp_path / "models")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2, done.stderr
    assert "the model cannot be written" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
