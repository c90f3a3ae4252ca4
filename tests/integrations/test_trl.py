"""The example that trains: TRL's own GRPO trainer, with rollouts and rewards in sandboxes of a stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed")

from app.local.stack import StackPlan
from examples.train import __main__ as training
from examples.train.__main__ import GENERATIONS, form, train, verdicts
from examples.train.model import LETTERS, make_teacher
from examples.train.sandboxes import LocalSandbox, StackSandbox
from examples.train.task import OPERATORS
from examples.train.teachers import LocalTeacher, StackTeacher
from tangram import ActionLost, EnvironmentLost
from tests.live.support import Live, running

pytestmark = pytest.mark.real
JOB = "train"


def test_two_steps_have_the_same_rewards_in_sandboxes_as_in_subprocesses_and_leave_no_environment(live: Live, tmp_path: Path) -> None:
    with live.client(JOB) as client:
        train(lambda name, operator: StackSandbox(client, name, operator), None, 2, 1, tmp_path / "stack.jsonl")
    train(lambda _, operator: LocalSandbox(operator), None, 2, 1, tmp_path / "local.jsonl")
    stack, local = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("stack.jsonl", "local.jsonl"))
    assert [step["step"] for step in stack] == [1, 2]
    assert [step["reward"] for step in stack] == [step["reward"] for step in local]
    assert sum(step["reward"] for step in stack) > 0
    rollouts = f"select count(distinct environment) from actions where kind = 'cpu.open' and job = '{JOB}' and trajectory like 'step-%'"
    live.until(lambda: live.rows(rollouts) == [(2 * GENERATIONS * len(OPERATORS),)])
    left = f"select count(*) from environments where job = '{JOB}' and state = 'open'"
    live.until(lambda: live.rows(left) == [(0,)])


@pytest.mark.parametrize("where", ["stack", "local"])
def test_the_verdict_of_a_sandbox_is_the_reward(live: Live, where: str) -> None:
    with live.client(JOB) as client:
        sandbox = StackSandbox(client, "verdict", "*") if where == "stack" else LocalSandbox("*")
        try:
            assert (sandbox.run("call", "7"), sandbox.run("call", "x")) == ("1\n", "")
            assert verdicts([sandbox.run("judge", text) for text in ("*", "+", "x", "</s>")]) == [1.0, 0.0, 0.0, 0.0]
        finally:
            sandbox.close()


def test_a_rollout_that_the_stack_fails_has_no_reward(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise EnvironmentLost("its node died", "cpu-0")

    with live.client(JOB) as client:
        monkeypatch.setattr(client, "open", lost)
        assert verdicts([StackSandbox(client, "unlucky", "+").run("judge", "+"), "0.5\n"]) == [None, 0.5]


def test_a_teacher_prefers_what_is_well_formed_and_says_the_same_in_a_stack_as_here(real_component: None, tmp_path: Path) -> None:
    make_teacher(tmp_path / "grammar")
    rows = [[LETTERS.index(letter) for letter in text] for text in ("f71+", "f7?+", "fx?x", "f00%")]
    plan = StackPlan(nodes=1, cells=1, api_nodes=0, services_file=tmp_path / "grammar" / "services.toml")
    with running(tmp_path / "state", plan) as live, live.client(JOB) as client:
        taught = StackTeacher(client, "grammar")(rows)
    here = LocalTeacher(tmp_path / "grammar")(rows)
    for stack_row, here_row in zip(taught, here, strict=True):
        assert stack_row == pytest.approx(here_row, abs=1e-3)
    well, no_call, nothing, also_well = form(taught)
    assert min(well, also_well) > max(no_call, nothing)


@pytest.mark.parametrize(("where", "says"), [([], "service 'nosuch' is not declared"), (["--local"], "there is no folder nosuch")])
def test_a_teacher_that_is_not_there_ends_the_training_with_a_line(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, where: list[str], says: str
) -> None:
    monkeypatch.setattr(training, "Client", live.client)
    monkeypatch.setattr("sys.argv", ["train", "--teacher", "nosuch", "--steps", "1", "--out", f"{tmp_path}/log", *where])
    with pytest.raises(SystemExit) as ended:
        training.main()
    assert says in f"{ended.value} {capsys.readouterr().err}"


def test_a_step_whose_teacher_the_stack_fails_has_no_reward_of_form(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise ActionLost("its node died", "gpu-0")

    with live.client(JOB) as client:
        monkeypatch.setattr(client, "logprobs", lost)
        assert form(StackTeacher(client, "grammar")([[1, 2], [3, 4]])) == [None, None]
