"""`tangram plan` from outside, on small traces: the answer holds when it is replayed, and one less does not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.cli.forked import forked

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "examples" / "rollouts.jsonl"
SEEDS = 2
KEYS = {"cores", "gpus", "memory_mb", "target", "mean_act", "step_duration", "tried"}

Document = dict[str, Any]


def trajectory(draw: random.Random, number: int, *, scores: bool) -> Document:
    steps: list[Document] = []
    for _ in range(6):
        work_s = round(draw.expovariate(0.5) + 0.05, 3)
        action: Document = {"kind": "cpu.exec", "work_s": work_s, "units": [1, 2], "parallel_fraction": 0.8}
        if scores and draw.random() < 0.4:
            action = {"kind": "gpu.score", "service": "rm", "work_s": 1.0}
        steps.append({"think_s": draw.uniform(0.5, 3), "action": action})
    return {"schema": "tangram.trace/1", "trajectory": f"t{number}", "memory_mb": 100, "steps": steps}


def write_trace(path: Path, *, scores: bool = False) -> Path:
    draw = random.Random(7)
    header = {"schema": "tangram.trace/1", "services": {"rm": {"cells": 1, "memory_mb": 1000, "restore_s": 0.2}}}
    lines = ([header] if scores else []) + [trajectory(draw, number, scores=scores) for number in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl")


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """Return a trace that needs GPUs, too."""
    return write_trace(tmp_path / "trace.jsonl", scores=True)


def document(command: str, trace: Path, *words: str, cwd: Path | None = None) -> Document:
    done = forked(command, str(trace), *words, "--json", cwd=cwd or trace.parent)
    assert done.returncode == 0, done.stderr
    found: Document = json.loads(done.stdout)
    return found


def plan(trace: Path, *words: str) -> Document:
    return document("plan", trace, "--tile", "12", "--spread", "5", "--seeds", str(SEEDS), "--no-curve", "--processes", "2", *words)


def replays(trace: Path, *words: str) -> list[Document]:
    seeds = [("--tile", "12", "--spread", "5", "--seed", str(seed)) for seed in range(SEEDS)]
    return [document("replay", trace, "--simulate", *each, *words) for each in seeds]


def refused(trace: Path, *words: str) -> str:
    done = forked("plan", str(trace), *words, cwd=trace.parent)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines), done.stdout) == (2, 1, ""), (done.returncode, done.stderr)
    return lines[0]


def test_the_answer_meets_its_target_when_replayed_and_a_core_less_does_not(trace: Path) -> None:
    found = plan(trace, "--no-worse-than", "static:1", "--than-cores", "12")

    assert set(found) >= KEYS
    compared = replays(trace, "--policy", "static:1", "--cores", "12")

    def no_worse(cores: int) -> bool:
        pairs = zip(replays(trace, "--cores", str(cores)), compared, strict=True)
        return all(new[key] <= old[key] * (1 + 1e-9) for new, old in pairs for key in ("mean_act", "step_duration"))

    assert 1 < found["cores"] < 12
    assert no_worse(found["cores"]) and not no_worse(found["cores"] - 1)
    assert (found["gpus"], found["memory_mb"] % 100, found["memory_mb"] > 0) == (0, 0, True)
    worst = max(replays(trace, "--cores", str(found["cores"])), key=lambda each: each["step_duration"])
    assert found["by_seed"][int(found["seed"])]["mean_act"] == found["mean_act"]
    assert worst["step_duration"] in [each["step_duration"] for each in found["by_seed"]]


@pytest.mark.parametrize("words", [("--cores-per-node", "2"), ("--nodes", "2")])
def test_cores_come_in_nodes(trace: Path, words: tuple[str, str]) -> None:
    found = plan(trace, "--target-act", "2.5", *words)

    def meets(nodes: int, cores: int) -> bool:
        return all(each["mean_act"] <= 2.5 for each in replays(trace, "--nodes", str(nodes), "--cores", str(cores)))

    nodes, cores = found["nodes"], found["cores_per_node"]
    assert found["cores"] == nodes * cores and (cores if words[0] == "--cores-per-node" else nodes) == 2
    assert meets(nodes, cores)
    assert not (meets(nodes - 1, cores) if words[0] == "--cores-per-node" else meets(nodes, cores - 1))


def test_gpus_are_as_few_as_suffice_and_prices_make_the_cheapest_the_answer(tmp_path: Path, scored: Path) -> None:
    fewest = plan(scored, "--target-act", "1.6")

    def meets(gpus: int) -> bool:
        words = ("--cores", str(fewest["cores"]), "--gpus", str(gpus))
        return all(each["failed"] == 0 and each["mean_act"] <= 1.6 for each in replays(scored, *words))

    assert fewest["gpus"] >= 2
    assert meets(fewest["gpus"]) and not meets(fewest["gpus"] - 1)
    # When GPUs are dear, then no more of them are wanted
    cheap_cores = tmp_path / "prices.toml"
    cheap_cores.write_text("core_hour = 0.01\ngpu_hour = 100.0\n")
    cheapest = plan(scored, "--target-act", "1.6", "--cost", str(cheap_cores))
    assert cheapest["cost"]["per_hour"] == pytest.approx(cheapest["cores"] * 0.01 + cheapest["gpus"] * 100)
    assert cheapest["gpus"] <= fewest["gpus"] and cheapest["cores"] >= fewest["cores"]
    assert cheapest["cost"]["per_hour"] <= fewest["cores"] * 0.01 + fewest["gpus"] * 100
    assert cheapest["by_seed"][0]["mean_act"] <= 1.6


def test_memory_by_action_is_less_than_the_limits_and_suffices_when_replayed(trace: Path) -> None:
    # Given rollouts whose limits are ten times what most of their actions use
    draw = random.Random(3)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in lines:
        line["memory_mb"] = 1000
        for step in line["steps"]:
            step["action"] |= {"memory_mb": draw.choice([80, 100, 120, 700]), "resident_mb": 60}
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("--no-worse-than", "static:1", "--than-cores", "12")
    # When machines are planned for memory by action, and for limits
    found, limits = plan(trace, *words), plan(trace, "--policy", "fcfs", "--target-act", "3")
    # Then the answer is below the limits, and a replay with that memory meets the target
    assert found["memory_mb"] < 0.7 * found["memory_mb_by_limit"] and found["memory_mb_by_limit"] % 1000 == 0
    assert limits["memory_mb"] == limits["memory_mb_by_limit"]
    again = replays(trace, "--cores", str(found["cores"]), "--memory-mb", str(found["memory_mb"]))
    assert all(one["mean_act"] <= each["target"]["mean_act"] for one, each in zip(again, found["by_seed"], strict=True))
    assert all(one["step_duration"] <= each["target"]["step_duration"] for one, each in zip(again, found["by_seed"], strict=True))
    assert max(one["memory_mb_peak_booked"] for one in again) <= found["memory_mb"]
    # And with memory that is given, the answer is no more than that
    given = plan(trace, *words, "--memory-mb", str(found["memory_mb"]))
    assert given["memory_mb_per_node"] == found["memory_mb"] < given["memory_mb_by_limit"]


def test_memory_that_only_requests_to_apis_name_is_none_of_a_machine(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    action = {"kind": "api.call", "quota": "search", "work_s": 1.0, "memory_mb": 100}
    quotas = {"search": {"rate_per_s": 5, "concurrency": 5}}
    lines = ({"quotas": quotas}, {"trajectory": "t", "memory_mb": 1000, "steps": [{"think_s": 0, "action": action}]})
    trace.write_text("".join(json.dumps({"schema": "tangram.trace/1"} | line) + "\n" for line in lines))
    assert plan(trace, "--target-act", "30")["memory_mb"] == 0


def test_a_quota_is_as_low_as_suffices(tmp_path: Path) -> None:
    found = document("plan", BUNDLED, "--target-step", "84", "--no-curve", cwd=tmp_path)
    quota = found["quotas"]["search"]
    assert quota["declared_per_s"] == 20.0 and 0 < quota["suffices_per_s"] <= 20.0
    assert found["step_duration"] <= 84
    assert [each["seed"] for each in found["by_seed"]] == [0]  # nothing is drawn without --tile


def test_a_person_sees_the_answer_its_curve_and_other_loads(trace: Path) -> None:
    done = forked("plan", str(trace), "--target-act", "2.5", cwd=trace.parent)
    assert done.returncode == 0, done.stderr
    memory = "MB of memory for 6 trajectories under elastic"
    for words in ("cores, ", memory, "answer", "1.5 × the trajectories", "tangram plan --calibrate"):
        assert words in done.stdout
    assert done.stderr == ""


def test_what_cannot_be_met_is_told_in_one_line(trace: Path) -> None:
    floor = document("replay", trace, "--simulate", "--cores", "100")["floor_act"]
    assert "below the floor" in refused(trace, "--target-act", str(floor * 0.99))
    assert "below the floor" in refused(trace, "--target-step", "1")
    said = refused(trace, "--target-act", str(floor * 1.0001), "--policy", "fcfs")
    assert "no number of cores meets the target" in said and "under fcfs" in said
    assert "never run" in refused(trace, "--no-worse-than", "static:4", "--than-cores", "2")


def test_a_calibration_that_was_cut_short_keeps_no_plan_back(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "calibration.json").write_text('{"at": 17')
    words = ("--target-act", "1000", "--seeds", "1", "--no-curve", "--processes", "1", "--json")
    done = forked("plan", str(trace), *words, cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["calibration"] is None
    assert f"{tmp_path}/state/calibration.json" in done.stderr and "remove this file" in done.stderr


def test_words_that_do_not_go_together_are_refused(tmp_path: Path, trace: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("core_hour = -1\n")
    for words, said in (
        ((), "say one target"),
        (("--target-act", "1", "--target-step", "1"), "say one target"),
        (("--no-worse-than", "static:1"), "go together"),
        (("--no-worse-than", "none", "--than-cores", "1"), "'none' is none of"),
        (("--target-act", "nan"), "--target-act"),
        (("--target-act", "1", "--nodes", "1", "--cores-per-node", "1"), "--cores-per-node"),
        (("--target-act", "1", "--cost", str(prices)), "core_hour"),
        (("--target-act", "1", "--cost", str(tmp_path / "none.toml")), "cannot be read"),
        (("--target-act", "1", "--calibrate"), "takes no target"),
    ):
        assert said in refused(trace, *words), words
    done = forked("plan", "--target-act", "1", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "") and "TRACE" in done.stderr


def test_policies_are_compared_in_one_document_with_a_key_for_each(trace: Path) -> None:
    words = ("--simulate", "--cores", "3", "--tile", "8")
    measured = ("decision_us_p50", "decision_us_p99")
    found = document("replay", trace, *words, "--compare", "elastic,static:1")
    assert list(found) == ["elastic", "static:1"]
    for policy, each in found.items():
        alone = document("replay", trace, *words, "--policy", policy)
        assert {key: each[key] for key in alone if key not in measured} == {key: alone[key] for key in alone if key not in measured}
    for wrong in (("--policy", "fcfs", "--compare", "elastic,fcfs"), *(("--compare", names) for names in ("fcfs", "fcfs,fcfs", "a,b"))):
        done = forked("replay", str(trace), *words, *wrong, cwd=trace.parent)
        assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "")
    assert "static:1" in forked("replay", str(trace), *words, "--compare", "elastic,static:1", cwd=trace.parent).stdout
