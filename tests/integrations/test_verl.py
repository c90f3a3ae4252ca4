"""verl's own tool agent loop and reward manager, with a scripted model, on a stack."""

from __future__ import annotations

import gc
import importlib.util
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.workers.rollout.replica import TokenOutput

from examples.integrations.verl_rollout import CHECK, HERE, TURNS, ScriptedModel, make_loop, make_tokenizer, score
from tangram import AsyncClient
from tangram.integrations.verl import RolloutFailed, SandboxTool
from tangram.integrations.verl_reward import ScoreFailed, compute_score
from tests.clients.rows import shows
from tests.integrations.conftest import standing
from tests.live.support import Live

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("live")]
PROMPT = [{"role": "user", "content": "Make add() add."}]


class Unlucky(ScriptedModel):
    """Loses the environment of its first rollouts before their last command."""

    def __init__(self, tokenizer: Any, losses: int) -> None:
        super().__init__(tokenizer)
        self._losses = losses

    async def generate(self, request_id: str, **more: Any) -> TokenOutput:
        output = await super().generate(request_id, **more)
        if self._turn[request_id] == len(TURNS) and self.rollouts <= self._losses:
            async with AsyncClient("verl") as other:
                await other.cancel(trajectory=f"verl-{request_id}")
        return output


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def tool(**config: Any) -> SandboxTool:
    return SandboxTool({"type": "native", **config}, None)


@shows("verl", "SandboxToolAgentLoop, several turns on one environment, and NaiveRewardManager with compute_score")
async def test_a_rollout_of_several_turns_has_one_environment_which_its_score_closes(live: Live, tokenizer: Any) -> None:
    tools = load_all_tools(tool_config_path=str(HERE / "verl_tools.yaml"), function_tool_path=None)
    output = await make_loop(ScriptedModel(tokenizer), tokenizer, tools).run({}, raw_prompt=PROMPT)
    said = tokenizer.decode(output.response_ids)
    assert said.index("<tool>-1</tool>") < said.index("<tool>5</tool>") < said.index("It is done.")
    environment = output.extra_fields["tangram"]["environment"]
    live.until(lambda: environment in standing(live))
    scored = await score(output, tokenizer, CHECK)
    assert scored == {"reward_score": 1.0, "reward_extra_info": {"score": 1.0, "exit_code": 0}}
    live.until(lambda: environment not in standing(live))


@shows("verl", "ToolAgentLoop (its own), with our tool")
async def test_verls_own_loop_leaves_no_environment(live: Live, tokenizer: Any) -> None:
    before = standing(live)
    output = await make_loop(ScriptedModel(tokenizer), tokenizer, [tool()], kind=ToolAgentLoop).run({}, raw_prompt=PROMPT)
    assert "<tool>5</tool>" in tokenizer.decode(output.response_ids) and "tangram" not in output.extra_fields
    gc.collect()
    async with AsyncClient("verl") as other:  # the loop goes on meanwhile
        for _ in range(100):
            if set(standing(live)) <= set(before):
                break
            await (await other.open(trajectory="other")).close()
    assert set(standing(live)) <= set(before)


@shows("verl", "ToolAgentLoop (its own) where the stack failed", "differs: it stops the step; our loop begins the rollout anew")
async def test_a_rollout_in_which_the_stack_failed_is_started_anew(live: Live, tokenizer: Any) -> None:
    model = Unlucky(tokenizer, losses=1)
    output = await make_loop(model, tokenizer, [tool(keep_for_scoring=True)]).run({}, raw_prompt=PROMPT)
    assert model.rollouts == 2 and "<tool>5</tool>" in tokenizer.decode(output.response_ids)
    assert (await score(output, tokenizer, CHECK))["reward_score"] == 1.0


async def test_one_that_fails_again_and_again_is_an_error_and_no_score(live: Live, tokenizer: Any) -> None:
    model = Unlucky(tokenizer, losses=9)
    with pytest.raises(RolloutFailed, match="3 attempts"):
        await make_loop(model, tokenizer, [tool()]).run({}, raw_prompt=PROMPT)
    assert model.rollouts == 3


@shows("verl", "ToolAgentLoop (its own) where the stack failed")
async def test_verls_own_loop_stops_where_the_stack_failed(live: Live, tokenizer: Any) -> None:
    with pytest.raises(RolloutFailed):
        await make_loop(Unlucky(tokenizer, losses=1), tokenizer, [tool()], kind=ToolAgentLoop).run({}, raw_prompt=PROMPT)


async def test_a_command_that_no_shell_can_have_is_an_answer_to_the_model(live: Live, tokenizer: Any) -> None:
    model = ScriptedModel(tokenizer, ("echo \0", "echo \ud800", "", "echo fine"))
    output = await make_loop(model, tokenizer, [tool()]).run({}, raw_prompt=PROMPT)
    said = tokenizer.decode(output.response_ids)
    assert model.rollouts == 1 and said.count("Error executing tool") == 3 and "<tool>fine</tool>" in said


@shows("verl", "load_all_tools(function_tool_path)")
async def test_a_function_tool_runs_in_a_sandbox_of_its_own(live: Live, tokenizer: Any) -> None:
    found = importlib.util.find_spec("tangram.integrations.verl_functions")  # verl runs the file itself
    assert found is not None
    functions = load_all_tools(tool_config_path=None, function_tool_path=found.origin)
    model = ScriptedModel(tokenizer, ("import os; print(6 * 7, os.listdir('.'))",), tool="run_python", key="code")
    output = await make_loop(model, tokenizer, functions).run({}, raw_prompt=PROMPT)
    assert "42 ['program.py']" in tokenizer.decode(output.response_ids)


@shows("verl", "reward.custom_reward_function: compute_score")
async def test_a_solution_is_checked_beside_its_files() -> None:
    async def scored(code: str, **more: Any) -> dict[str, Any]:
        info = {"files": {"check.py": "from solution import add\nassert add(2, 3) == 5\n"}}
        return await compute_score("sums", f"It is so:\n```python\n{code}\n```\n", "python3 check.py", info, **more)

    assert await scored("def add(a, b): return a + b") == {"score": 1.0, "exit_code": 0}
    assert await scored("def add(a, b): return a - b") == {"score": 0.0, "exit_code": 1}
    assert await scored("'\ud800'\ndef add(a, b): return a + b") == {"score": 1.0, "exit_code": 0}
    assert await scored("while True: pass", timeout_s=1.0) == {"score": 0.0, "exit_code": -1}


@shows("verl", "compute_score where the stack failed", "differs: verl has no reward that means none, so ScoreFailed stops the step")
async def test_a_score_whose_environment_is_gone_is_an_error(live: Live, tokenizer: Any) -> None:
    output = await make_loop(ScriptedModel(tokenizer), tokenizer, [tool(keep_for_scoring=True)]).run({}, raw_prompt=PROMPT)
    async with AsyncClient("verl") as other:
        await other.cancel(trajectory=output.extra_fields["tangram"]["trajectory"])
    with pytest.raises(ScoreFailed, match="there is no score of a solution of example"):
        await score(output, tokenizer, CHECK)
