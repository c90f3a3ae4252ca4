"""Train a tiny model from scratch by TRL's GRPO: `python -m examples.train`. The README beside it says how."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns that `rollout_func` may change

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.train.sandboxes import LocalSandbox, Sandbox, StackSandbox
from examples.train.task import OPERATORS
from tangram import Client

LETTERS = [*"0123456789x+-*%?f", "<pad>", "</s>"]
PROMPT = [LETTERS.index("f")]
GENERATIONS = 8
AT_ONCE = GENERATIONS * len(OPERATORS)


class Rollouts:
    """All rollouts of a step, side by side: the model calls the hidden function, sees what it returns, and names the operator."""

    def __init__(self, make_sandbox: Callable[[str, str], Sandbox]) -> None:
        """Begin with step 0; `make_sandbox` takes a name and the operator to hide."""
        self._make_sandbox, self._pool = make_sandbox, ThreadPoolExecutor(AT_ONCE)
        self._step = 0
        self.sandbox_s = 0.0

    def __call__(self, operators: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return what TRL trains on. A prompt of the data set is the operator to hide; the model itself sees no more than an `f`."""
        sandboxes = [self._make_sandbox(f"step-{self._step}-{number}", operator) for number, operator in enumerate(operators)]
        self._step, self.sandbox_s = self._step + 1, 0.0
        try:
            ids = write(trainer.model, torch.tensor([PROMPT] * len(operators)))
            returned = self._run_all(sandboxes, "call", ids)
            seen = [LETTERS.index((text or "?")[0]) for text in returned]
            ids = write(trainer.model, torch.cat([ids, torch.tensor(seen)[:, None]], dim=1))
            verdicts = self._run_all(sandboxes, "judge", ids)
        finally:
            list(self._pool.map(lambda sandbox: sandbox.close(), sandboxes))
        return {
            "prompt_ids": [PROMPT] * len(operators),
            "completion_ids": ids[:, len(PROMPT) :].tolist(),
            "env_mask": [[1, 0, 1]] * len(operators),  # the model did not write what the function returned
            "logprobs": None,
            "verdict": verdicts,
        }

    def _run_all(self, sandboxes: list[Sandbox], action: str, ids: torch.Tensor) -> list[str | None]:
        """Run an action on the last letter of each rollout, all at once."""
        begun = time.perf_counter()
        answers = list(self._pool.map(lambda sandbox, last: sandbox.run(action, LETTERS[last]), sandboxes, ids[:, -1].tolist()))
        self.sandbox_s += time.perf_counter() - begun
        return answers


@torch.no_grad()
def write(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Append one letter, which the model draws, to each row."""
    return torch.cat([ids, torch.multinomial(model(ids).logits[:, -1].softmax(dim=-1), 1)], dim=1)


def reward(verdict: list[str | None], **_: Any) -> list[float | None]:
    """Return the shares of inputs that were right: 0 where the program failed, and None, which TRL leaves out, where the stack did."""
    return [None if text is None else float(text or 0) for text in verdict]


class Log(TrainerCallback):
    """Appends a line of JSON to a file for each step."""

    def __init__(self, path: Path, rollouts: Rollouts) -> None:
        """Empty the file."""
        self._path, self._rollouts = path, rollouts
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Take the time."""
        self._begun = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write the line."""
        if logs and "reward" in logs:
            step, mean, seconds, sandbox_s = state.global_step, logs["reward"], time.perf_counter() - self._begun, self._rollouts.sandbox_s
            with self._path.open("a") as file:
                print(json.dumps({"step": step, "reward": mean, "seconds": seconds, "sandbox_seconds": sandbox_s}), file=file)
            print(f"step {step}: reward {mean:.2f}, {seconds:.2f} s, of which sandboxes {sandbox_s:.2f} s", flush=True)


def make_model() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Return a model that knows nothing, of about 190,000 parameters, and its tokenizer of single letters."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(LETTERS)}, merges=[]))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(
        vocab_size=len(LETTERS), initializer_range=0.1, pad_token_id=wrapped.pad_token_id, eos_token_id=wrapped.eos_token_id, **sizes
    )
    return Qwen2ForCausalLM(config), wrapped


def train(make_sandbox: Callable[[str, str], Sandbox], steps: int, seed: int, out: Path) -> None:
    """Train for some steps and log each into `out`."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, tokenizer = make_model()
    rollouts = Rollouts(make_sandbox)
    config = GRPOConfig(
        output_dir=out.parent, max_steps=steps, per_device_train_batch_size=AT_ONCE, num_generations=GENERATIONS, shuffle_dataset=False,
        learning_rate=1e-3, lr_scheduler_type="constant", scale_rewards="none", entropy_coef=0.05,
        seed=seed, use_cpu=True, bf16=False, gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, args=config, train_dataset=Dataset.from_dict({"prompt": list(OPERATORS) * steps}),
        rollout_func=rollouts, reward_funcs=reward, callbacks=[Log(out, rollouts)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m examples.train")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("train.jsonl"), help="the log, a line for each step")
    parser.add_argument("--local", action="store_true", help="run programs as subprocesses of this machine, without a stack")
    options = parser.parse_args()
    with nullcontext() if options.local else Client(job="train") as client:
        make_sandbox = partial(StackSandbox, client) if client else lambda _, operator: LocalSandbox(operator)
        train(make_sandbox, options.steps, options.seed, options.out)


if __name__ == "__main__":
    main()
