"""Train a tiny model from scratch by TRL's GRPO: `python -m examples.train`. The README beside it says how."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns that `rollout_func` may change

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.train.model import LETTERS, PROMPT, make_model
from examples.train.sandboxes import LocalSandbox, Sandbox, StackSandbox
from examples.train.task import OPERATORS
from examples.train.teachers import LocalTeacher, StackTeacher, Teacher
from tangram import Client, TangramError

GENERATIONS = 8
AT_ONCE = GENERATIONS * len(OPERATORS)
FORM_WEIGHT = 0.05
WRITTEN = (0, 2)
"""Where the letters that the model writes are among those after the prompt; between them is what the function returned."""


class Rollouts:
    """All rollouts of a step, side by side: the model calls the hidden function, sees what it returns, and names the operator."""

    def __init__(self, make_sandbox: Callable[[str, str], Sandbox], teacher: Teacher | None) -> None:
        """Begin with step 0; `make_sandbox` takes a name and the operator to hide."""
        self._make_sandbox, self._teacher, self._pool = make_sandbox, teacher, ThreadPoolExecutor(AT_ONCE + 1)
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
            taught = self._pool.submit(self._teacher, ids.tolist()) if self._teacher is not None else None  # while programs judge
            verdicts = self._run_all(sandboxes, "judge", ids)
        finally:
            list(self._pool.map(lambda sandbox: sandbox.close(), sandboxes))
        return {
            "prompt_ids": [PROMPT] * len(operators),
            "completion_ids": ids[:, len(PROMPT) :].tolist(),
            "env_mask": [[1, 0, 1]] * len(operators),  # the model did not write what the function returned
            "logprobs": None,
            "verdict": verdicts,
            "taught": taught.result() if taught is not None else [None] * len(operators),
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


def verdicts(verdict: list[str | None], **_: Any) -> list[float | None]:
    """Return the shares of inputs that were right: 0 where the program failed, and None, which TRL leaves out, where the stack did."""
    return [None if text is None else float(text or 0) for text in verdict]


def form(taught: list[list[float] | None], **_: Any) -> list[float | None]:
    """Return the teacher's mean log-prob of the letters that the model wrote: None where nobody teaches, or the stack failed."""
    return [None if logprobs is None else fmean(logprobs[place] for place in WRITTEN) for logprobs in taught]


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
            line = {
                "step": state.global_step,
                "reward": logs["rewards/verdicts/mean"],
                "seconds": time.perf_counter() - self._begun,
                "sandbox_seconds": self._rollouts.sandbox_s,
            }
            with self._path.open("a") as file:
                print(json.dumps(line), file=file)
            print("step {step}: reward {reward:.2f}, {seconds:.2f} s, in sandboxes {sandbox_seconds:.2f} s".format(**line), flush=True)


def train(make_sandbox: Callable[[str, str], Sandbox], teacher: Teacher | None, steps: int, seed: int, out: Path) -> None:
    """Train for some steps and log each into `out`."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, tokenizer = make_model()
    rollouts = Rollouts(make_sandbox, teacher)
    config = GRPOConfig(
        output_dir=out.parent, max_steps=steps, per_device_train_batch_size=AT_ONCE, num_generations=GENERATIONS, shuffle_dataset=False,
        learning_rate=1e-3, lr_scheduler_type="constant", scale_rewards="none", entropy_coef=0.05, reward_weights=[1.0, FORM_WEIGHT],
        seed=seed, use_cpu=True, bf16=False, gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, args=config, train_dataset=Dataset.from_dict({"prompt": list(OPERATORS) * steps}),
        rollout_func=rollouts, reward_funcs=[verdicts, form], callbacks=[Log(out, rollouts)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m examples.train")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("train.jsonl"), help="the log, a line for each step")
    parser.add_argument("--teacher", type=Path, help="the folder of a teacher that the stack serves under the folder's name")
    parser.add_argument("--local", action="store_true", help="run programs as subprocesses of this machine, without a stack")
    options = parser.parse_args()
    if options.local and options.teacher and not options.teacher.is_dir():
        parser.error(f"--teacher: there is no folder {options.teacher}")
    try:
        with nullcontext() if options.local else Client(job="train") as client:
            make_sandbox = partial(StackSandbox, client) if client else lambda _, operator: LocalSandbox(operator)
            teacher = options.teacher and (StackTeacher(client, options.teacher.name) if client else LocalTeacher(options.teacher))
            train(make_sandbox, teacher, options.steps, options.seed, options.out)
    except TangramError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
