"""`make figures`: what is kept, how a value is compared with earlier ones, and what cannot be measured. The figures here are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.figures import history
from bench.figures.__main__ import main
from bench.figures.registry import Figure, all_figures, pick
from bench.tools import NotMeasured

TEN = [1.0, 1.1, 0.9, 1.0, 1.0, 1.2, 1.0, 1.0, 0.8, 1.0]


def made_up(name: str, measure: Callable[[], float]) -> Figure:
    return Figure(name=name, unit="ms", meaning=f"the meaning of {name}", measure=measure)


def missing() -> float:
    raise NotMeasured("there is no\nengine")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return what measures made-up figures; it gives the exit code, standard output and standard error."""

    def measured(*arguments: str, **figures: Callable[[], float]) -> tuple[int, str, str]:
        code = main([*arguments, "--history", str(tmp_path / "h" / "history.jsonl")], [made_up(*each) for each in figures.items()])
        return code, *capsys.readouterr()

    return measured


@pytest.mark.parametrize(
    ("value", "earlier", "words"),
    [
        (1.0, [], "no earlier value"),
        (9.0, [1.0, 1.0], "too few earlier values: 2"),
        (1.0, TEN, "not moved"),
        (1.2, TEN, "not moved"),  # far off the median, and no higher than one of the last
        (1.15, [1.0] * 10, "not moved"),  # higher than all, and not far off
        (1.5, TEN, "MOVED: 50% above the median, above all of the last 10"),
        (0.5, TEN, "MOVED: 50% below the median, below all of the last 10"),
        (1.0, [0.0] * 4, "MOVED: above the median, which is 0, above all of the last 4"),
        (0.0, [0.0] * 4, "not moved"),
        (-3.0, [-1.0, -1.1, -0.9], "MOVED: 200% below the median, below all of the last 3"),
        (1.5, [9.0, *TEN], "MOVED: 50% above the median, above all of the last 10"),  # the value before these no longer counts
    ],
)
def test_a_value_has_moved_when_it_is_outside_the_last_ten_and_far_off_their_median(value: float, earlier: list[float], words: str) -> None:
    assert history.words(value, earlier) == words
    assert history.moved(value, earlier) == words.startswith("MOVED")


def test_each_run_adds_to_the_history_and_shows_the_last_ten(run: Any, tmp_path: Path) -> None:
    values = iter([7.0, *TEN, 3.0])
    for _ in range(11):
        code, out, _ = run(speed=lambda: next(values))
        assert code == 0 and "none of 1 has moved" in out
    code, out, _ = run(speed=lambda: next(values))
    # A figure that moved is no failure
    assert code == 0 and out.endswith("moved: speed\n")
    assert "3 ms" in out and "(last: 1 1.1 0.9 1 1 1.2 1 1 0.8 1)" in out
    lines = [json.loads(line) for line in (tmp_path / "h" / "history.jsonl").read_text().splitlines()]
    assert [line["value"] for line in lines] == [7.0, *TEN, 3.0]
    assert {(line["name"], line["unit"]) for line in lines} == {("speed", "ms")}


def test_what_cannot_be_measured_is_one_line_and_keeps_no_other_from_it(run: Any, tmp_path: Path) -> None:
    code, out, err = run(absent=missing, broken=lambda: 1 / 0, speed=lambda: 2.0)
    assert code == 1
    lines = [line for line in err.splitlines() if "not measured" in line]
    assert lines == [
        "bench.figures: not measured: absent: NotMeasured: there is no engine",
        "bench.figures: not measured: broken: ZeroDivisionError: division by zero",
    ]
    assert "speed" in out and "absent" not in out
    assert len((tmp_path / "h" / "history.jsonl").read_text().splitlines()) == 1


def test_names_pick_figures_and_a_wrong_one_measures_nothing(run: Any) -> None:
    code, out, _ = run("b", a=missing, b=lambda: 1.0)
    assert code == 0 and out.startswith("b ")
    code, out, err = run("c", a=missing, b=lambda: 1.0)
    assert (code, out) == (2, "") and err.splitlines() == ["bench.figures: no figure is called c; there are a, b"]


def test_every_figure_has_a_unit_and_says_what_it_is() -> None:
    figures = all_figures()
    assert all(one.unit and one.meaning for one in figures)
    assert pick(figures, ["journal_commit"])[0].unit == "ms"
