"""`tangram plan --calibrate` from outside: live runs on this machine, compared with their simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.forked import forked
from tests.cli.support import tangram

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


STEPS = 2
"""How many steps of a rollout are replayed besides its last one, which is scored."""


def two_rollouts(folder: Path) -> Path:
    """Return a trace of the first steps and the last one of two of the bundled rollouts, beside the files that they start from."""
    header, *lines = (EXAMPLES / "rollouts.jsonl").read_text().splitlines()
    rollouts = [json.loads(lines[number]) for number in (0, 5)]
    for rollout in rollouts:
        rollout["steps"] = [*rollout["steps"][:STEPS], rollout["steps"][-1]]
    (folder / "repo").symlink_to(EXAMPLES / "repo")
    path = folder / "two.jsonl"
    path.write_text("\n".join([header, *map(json.dumps, rollouts)]) + "\n")
    return path


def test_a_calibration_compares_live_runs_with_their_simulation_and_plans_show_it(tmp_path: Path) -> None:
    # Given rollouts that are replayed live, twice
    trace = str(two_rollouts(tmp_path))
    done = tangram(tmp_path, "plan", trace, "--calibrate", "--json", timeout_s=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["policies"]) == ["static:1", "elastic"]
    for of in found["policies"].values():
        for key, error in of["error"].items():
            assert of["simulated"][key] == pytest.approx(of["live"][key] * (1 + error))
        assert of["live"]["mean_execution"] > 0 and of["overhead_s"] > 0
        assert of["simulated"]["mean_act"] > 0
    words = ("plan", trace, "--target-step", "90", "--no-curve", "--processes", "1")
    planned = forked(*words, "--json", cwd=tmp_path)
    assert json.loads(planned.stdout)["calibration"]["policies"]["elastic"]["error"] == found["policies"]["elastic"]["error"]
    assert "the simulator's error on this machine" in forked(*words, cwd=tmp_path).stdout
