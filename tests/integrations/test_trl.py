"""The example that trains: TRL's own GRPO trainer, with rollouts and rewards in sandboxes of a stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed")

from examples.train.__main__ import GENERATIONS, train, verdicts
from examples.train.sandboxes import LocalSandbox, StackSandbox
from examples.train.task import OPERATORS
from tangram import EnvironmentLost
from tests.clients.rows import shows
from tests.live.support import Live

pytestmark = pytest.mark.real
JOB = "train"


@shows(
    "trl",
    "GRPOTrainer(rollout_func), with tools and rewards in sandboxes and a teacher: examples/train",
    "works; a reward of None where the stack failed, which TRL leaves out",
)
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


@shows("trl", "GRPOTrainer(rollout_func), with tools and rewards in sandboxes and a teacher: examples/train")
@pytest.mark.parametrize("where", ["stack", "local"])
def test_the_verdict_of_a_sandbox_is_the_reward(live: Live, where: str) -> None:
    with live.client(JOB) as client:
        sandbox = StackSandbox(client, "verdict", "*") if where == "stack" else LocalSandbox("*")
        try:
            assert (sandbox.run("call", "7"), sandbox.run("call", "x")) == ("1\n", "")
            assert verdicts([sandbox.run("judge", text) for text in ("*", "+", "x", "</s>")]) == [1.0, 0.0, 0.0, 0.0]
        finally:
            sandbox.close()


@shows("trl", "GRPOTrainer(rollout_func), with tools and rewards in sandboxes and a teacher: examples/train")
def test_a_rollout_that_the_stack_fails_has_no_reward(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise EnvironmentLost("its node died", "cpu-0")

    with live.client(JOB) as client:
        monkeypatch.setattr(client, "open", lost)
        assert verdicts([StackSandbox(client, "unlucky", "+").run("judge", "+"), "0.5\n"]) == [None, 0.5]
