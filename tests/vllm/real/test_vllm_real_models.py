"""Real vLLM servers behind the whole system, against transformers: an adapter, a reward model of vLLM's own, templates of a service.

The two servers take turns on one cell, and one of them is killed at work: starting a server takes a minute of processor time.
Without `.venv-vllm` the test is skipped; with CI set, that is a failure.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines.reference import expected_logprobs, real_python
from tests.vllm.system import Served, services_toml, system, take_turns

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

SEQUENCES = [[(7 * index + 31 * place) % 512 for place in range(2 + 9 * index)] for index in range(6)]
ITEMS: list[dict[str, Any]] = [
    *({"prompt": f"Question {index}: what is {index} + 2?", "response": f"It is {index + 2}. " * (1 + index)} for index in range(4)),
    {"prompt": [{"role": "user", "content": "2 + 3?"}], "response": "5"},
]
CHAT_TEMPLATE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"
TEXTS = [*(f"Q: {item['prompt']} A: {item['response']}" for item in ITEMS[:4]), "[user] 2 + 3?[assistant] 5"]
"""What the templates make of the items."""


def adapter(models: Path, folder: Path) -> tuple[Served, list[list[float]]]:
    """Make a LoRA adapter of rank 4 for the queries of all layers, scaled by 8 / 4; return also what merged weights answer."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "teacher-0", dtype=torch.float32)
    draws, tensors = torch.Generator().manual_seed(0), dict[str, Any]()
    for index, layer in enumerate(model.model.layers):
        down, up = torch.randn(4, 64, generator=draws) * 0.3, torch.randn(64, 4, generator=draws) * 0.3
        named = f"base_model.model.model.layers.{index}.self_attn.q_proj"
        tensors |= {f"{named}.lora_A.weight": down, f"{named}.lora_B.weight": up}
        layer.self_attn.q_proj.weight.data += 8 / 4 * up @ down
    model.save_pretrained(folder / "merged")
    own = folder / "adapter"
    own.mkdir()
    save_file(tensors, own / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "task_type": "CAUSAL_LM"}
    (own / "adapter_config.json").write_text(json.dumps(about))
    return Served(model=models / "teacher-0", more=f'adapter = "{own}"'), expected_logprobs(folder / "merged", SEQUENCES)


def reward_model(models: Path, folder: Path) -> tuple[Served, list[float]]:
    """Make a reward model with a head of two layers, under templates of the service's own; return also what transformers answers."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    own = Path(shutil.copytree(models / "rm-small", folder / "reward"))
    tensors, draws = load_file(own / "model.safetensors"), torch.Generator().manual_seed(1)
    del tensors["score.weight"]
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    for name, parameter in head.named_parameters():
        parameter.data.normal_(0.0, 0.3, generator=draws)
        tensors[f"score.{name}"] = parameter.detach()
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForRewardModel"]}))
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    templates = f'score_template = "Q: {{prompt}} A: {{response}}"\nchat_template = "{folder}/chat.jinja"'
    body = AutoModelForSequenceClassification.from_pretrained(models / "rm-small", dtype=torch.float32).eval().model
    tokenizer = AutoTokenizer.from_pretrained(own)
    with torch.inference_mode():
        scores = [float(head(body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1])) for text in TEXTS]
    return Served(model=own, more=templates, pooling="reward"), scores


def test_servers_answer_as_transformers_does_and_take_turns_and_one_that_is_killed_at_work_is_started_once(
    real_component: None, models: Path, tmp_path: Path
) -> None:
    python = real_python()
    (rm, scores), (teacher, logprobs) = reward_model(models, tmp_path), adapter(models, tmp_path)
    (tmp_path / "services.toml").write_text(services_toml(python, rm, teacher))
    with system(tmp_path / "state", tmp_path / "services.toml") as stack:
        found, of_adapter, server = take_turns(stack, ITEMS, SEQUENCES, "reward", lambda: stack.core("rm"))
        # Each start sets the log of the one before aside: that one is the killed server's.
        (log,) = (stack.live.stack.state_dir / "services").glob("vllm-rm-*.log")
        assert f"pid={server})" in log.with_name(log.name + ".1").read_text()
    assert max(scores) - min(scores) > 0.01 and found == pytest.approx(scores, abs=1e-4)
    for values, merged in zip(of_adapter, logprobs, strict=True):
        assert values == pytest.approx(merged, abs=1e-4)
    (plain,) = expected_logprobs(models / "teacher-0", SEQUENCES[-1:])
    assert max(abs(one - other) for one, other in zip(of_adapter[-1], plain, strict=True)) > 0.01
