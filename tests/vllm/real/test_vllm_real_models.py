"""What a service may say of its model, at real vLLM servers, against transformers: adapters, reward models of vLLM's own, templates.

Without `.venv-vllm` the tests are skipped; with CI set, that is a failure.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.services_file import ServiceConfig
from tests.engines.reference import expected_logprobs, real_python
from workers.gpu.device_memory import CpuMemory
from workers.gpu.devices import Device
from workers.gpu.engines.vllm.engine import VllmEngine

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CPU = [Device("cpu:0", "cpu", 4000, "cpu")]
SEQUENCES = [[(7 * index + 31 * place) % 512 for place in range(2 + 9 * index)] for index in range(6)]
ITEMS = [{"prompt": f"Question {index}: what is {index} + 2?", "response": f"It is {index + 2}. " * (1 + index)} for index in range(4)]

Start = Callable[..., VllmEngine]


@pytest.fixture
def start(real_component: None, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the server of a service."""
    python, engines = real_python(), list[VllmEngine]()

    def started(**table: Any) -> VllmEngine:
        vllm = {"python": python, "start_timeout_s": 600.0, "args": ["--max-model-len", "512"], **table.pop("vllm", {})}
        config = ServiceConfig.model_validate({"engine": "vllm", "memory_mb": 3000.0, **table, "vllm": vllm})
        engine = VllmEngine("asked", config, tmp_path, CpuMemory())
        engines.append(engine)
        engine.start(CPU)
        return engine

    yield started
    for engine in engines:
        engine.stop()


def test_an_adapter_changes_the_log_probs_as_merging_it_into_the_weights_does(start: Start, models: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    # Given a LoRA adapter of rank 4 for the queries of all layers, scaled by 8 / 4
    model = AutoModelForCausalLM.from_pretrained(models / "teacher-0", dtype=torch.float32)
    draws, tensors = torch.Generator().manual_seed(0), {}
    for index, layer in enumerate(model.model.layers):
        down, up = torch.randn(4, 64, generator=draws) * 0.3, torch.randn(64, 4, generator=draws) * 0.3
        named = f"base_model.model.model.layers.{index}.self_attn.q_proj"
        tensors |= {f"{named}.lora_A.weight": down, f"{named}.lora_B.weight": up}
        layer.self_attn.q_proj.weight.data += 8 / 4 * up @ down
    model.save_pretrained(tmp_path / "merged")
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(about))

    engine = start(task="logprobs", model=models / "teacher-0", adapter=folder)

    found = engine.logprobs(SEQUENCES)
    for values, merged in zip(found, expected_logprobs(tmp_path / "merged", SEQUENCES), strict=True):
        assert values == pytest.approx(merged, abs=1e-4)
    (plain,) = expected_logprobs(models / "teacher-0", SEQUENCES[-1:])
    assert max(abs(one - other) for one, other in zip(found[-1], plain, strict=True)) > 0.01


def test_a_reward_model_of_vllm_scores_by_its_last_token_under_templates_of_the_service(start: Start, models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    # Given a reward model with a head of two layers
    folder = Path(shutil.copytree(models / "rm-small", tmp_path / "rm"))
    tensors, draws = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    del tensors["score.weight"]
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    for name, parameter in head.named_parameters():
        parameter.data.normal_(0.0, 0.3, generator=draws)
        tensors[f"score.{name}"] = parameter.detach()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForRewardModel"]}))
    # And templates of the service's own
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}")
    engine = start(
        task="score",
        model=folder,
        score_template="Q: {prompt} A: {response}",
        chat_template=tmp_path / "chat.jinja",
        vllm={"pooling": "reward"},
    )
    talk = {"prompt": [{"role": "user", "content": "2 + 3?"}], "response": "5"}

    scores = engine.score([*ITEMS, talk])

    body = AutoModelForSequenceClassification.from_pretrained(models / "rm-small", dtype=torch.float32).eval().model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [*(f"Q: {item['prompt']} A: {item['response']}" for item in ITEMS), "[user] 2 + 3?[assistant] 5"]
    with torch.inference_mode():
        expected = [float(head(body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1])) for text in texts]
    assert max(expected) - min(expected) > 0.01
    assert scores == pytest.approx(expected, abs=1e-4)
