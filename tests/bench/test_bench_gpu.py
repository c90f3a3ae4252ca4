"""The benchmark of the GPU pool, on the CPU with small models: that it runs, and that a wrong answer is one."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench import gpu  # noqa: E402


def test_without_cuda_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert gpu.main([]) == 2

    assert capsys.readouterr().err == "there is no CUDA device here; --device cpu --small runs the same code on the CPU\n"


@pytest.mark.timeout(300)
def test_the_same_code_runs_on_the_cpu_and_every_answer_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--small"]) == 0

    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    marks = {words[1].strip(): words[4].strip() for words in table}
    assert marks["answers after restores"] == "met"
    assert marks["twelve services of 2 MiB on 8 MiB"] == "met"
    assert [mark for mark in marks.values() if mark] == ["met", "met"]


def test_a_target_that_is_missed_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "one_service", lambda *words: [gpu._returned("x", 100, 94, True), *gpu._rates(100, 1.0, 120.0, True)])
    monkeypatch.setattr(gpu, "many_services", lambda *words: [])

    assert gpu.main(["--device", "cpu"]) == 1

    assert capsys.readouterr().out.count("MISSED") == 1


def test_answers_that_are_no_numbers_or_too_few_are_wrong() -> None:
    assert gpu._furthest([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert gpu._furthest([1.0], [1.0, 2.0]) == math.inf
    assert gpu._furthest([math.nan], [1.0]) == math.inf
