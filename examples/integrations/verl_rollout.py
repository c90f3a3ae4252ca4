"""verl's tool agent loop over the stack, with a scripted model: several turns on one environment, then verl's reward manager.

    python -m examples.integrations.verl_rollout

Run it from the project's root beside a stack (`tangram up`). A trainer has the same in its configuration:

    actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/integrations/verl_tools.yaml
    actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/integrations/verl_agent_loop.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=tangram_tool_agent
    reward.custom_reward_function.path=pkg://tangram.integrations.verl_reward
    reward.custom_reward_function.name=compute_score
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from tangram.integrations.verl import SandboxToolAgentLoop
from tangram.integrations.verl_reward import compute_score

HERE = Path(__file__).resolve().parent
TURNS = (
    'printf "def add(a, b):\\n    return a - b\\n" > add.py && cd /tmp && cd -',
    "python3 -B -c 'import add; print(add.add(2, 3))'",
    "sed -i s/-/+/ add.py && python3 -B -c 'import add; print(add.add(2, 3))'",
)
CHECK = "python3 -B -c 'import add; assert add.add(2, 3) == 5'"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message.get('tool_calls', []) %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "</{{ message['role'] }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<pad>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", chat_template=TEMPLATE)


class ScriptedModel:
    """In the place of verl's language model servers: asks for one command after another, then says that it is done."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, commands: tuple[str, ...] = TURNS, tool: str = "bash", key: str = "command"
    ) -> None:
        self._tokenizer = tokenizer
        self._calls = [json.dumps({"name": tool, "arguments": {key: command}}) for command in commands]
        self._turn: dict[str, int] = {}
        self.rollouts = 0

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        """Return the tokens of the next turn of a rollout."""
        turn = self._turn.get(request_id, 0)
        self._turn[request_id], self.rollouts = turn + 1, self.rollouts + (turn == 0)
        text = f"<tool_call>{self._calls[turn]}</tool_call></assistant>" if turn < len(self._calls) else "It is done.</assistant>"
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return TokenOutput(token_ids=ids, log_probs=[0.0] * len(ids))


def make_loop(model: Any, tokenizer: Any, tools: list[Any], kind: type = SandboxToolAgentLoop) -> Any:
    """Make verl's agent loop, as its workers do, with the parts of the configuration that it reads."""
    rollout = {
        "prompt_length": 4096,
        "response_length": 8192,
        "full_determinism": False,
        "multi_turn": {
            "max_user_turns": 10,
            "max_assistant_turns": 10,
            "max_parallel_calls": 1,
            "max_tool_response_length": 4096,
            "tool_response_truncate_side": "middle",
            "format": "hermes",
        },
    }
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    return kind(
        trainer_config=DictConfigWrap(config),
        server_manager=model,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap(tools),
    )


async def score(output: AgentLoopOutput, tokenizer: Any, check: str, files: dict[str, str] | None = None) -> dict[str, Any]:
    """Score a rollout by verl's reward manager and our reward function, as verl's reward workers do."""
    prompts, responses = torch.tensor([output.prompt_ids]), torch.tensor([output.response_ids])
    tokens = torch.cat([prompts, responses], dim=1)
    batch = TensorDict({"prompts": prompts, "responses": responses, "attention_mask": torch.ones_like(tokens)}, batch_size=1)
    samples = {
        "data_source": np.array(["example"]),
        "reward_model": np.array([{"ground_truth": check}], dtype=object),
        "extra_info": np.array([{"files": files or {}}], dtype=object),
        "tool_extra_fields": np.array([output.extra_fields], dtype=object),
        "__num_turns__": np.array([output.num_turns]),
    }
    manager = NaiveRewardManager(OmegaConf.create({}), tokenizer, compute_score)
    scored: dict[str, Any] = await manager.run_single(DataProto(batch=batch, non_tensor_batch=samples))
    return scored


async def main() -> None:
    """Run a rollout, print it, and score it."""
    tokenizer = make_tokenizer()
    tools = load_all_tools(tool_config_path=str(HERE / "verl_tools.yaml"), function_tool_path=None)
    loop = make_loop(ScriptedModel(tokenizer), tokenizer, tools)
    output = await loop.run({}, raw_prompt=[{"role": "user", "content": "Make add() add."}])
    print(tokenizer.decode(output.response_ids))
    print(await score(output, tokenizer, CHECK))


if __name__ == "__main__":
    asyncio.run(main())
