"""Loading: every kind of checkpoint against transformers' own loading of it. What it takes of host memory is a figure."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.services_file import ConfigError
from tests.engines.fixtures import changed
from tests.lazily import Lazily, needs

pytestmark = needs("torch", "transformers")
torch, transformers = Lazily("torch"), Lazily("transformers")
loading, weights = Lazily("workers.gpu.engines.loading"), Lazily("workers.gpu.engines.weights")

SMALL = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "num_labels": 1, "pad_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


class Blocks:
    """Makes blocks, and remembers for which sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.block = torch.empty(0)

    def __call__(self, layout: Any) -> Any:
        self.sizes.append(layout.size_bytes)
        self.block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        return self.block


@pytest.fixture
def saved(models: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a model with random weights, of which every one matters, and a tokenizer."""

    def save(kind: str, config: object, **words: object) -> Path:
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
        model.save_pretrained(tmp_path / "model", **words)
        for file in (models / "rm-small").glob("tokenizer*"):
            shutil.copy(file, tmp_path / "model")
        return tmp_path / "model"

    return save


def same_as_transformers(folder: Path, task: str, dtype: str) -> Blocks:
    """Load a folder, compare every tensor with what transformers loads, and return the blocks that were made for it."""
    blocks = Blocks()
    loaded = loading.load(folder, task, dtype, blocks)
    kind = transformers.AutoModelForCausalLM if task == "logprobs" else transformers.AutoModelForSequenceClassification
    want = kind.from_pretrained(folder, dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype))
    loaded.layout.fill(loaded.model, blocks.block)
    ours, theirs = (dict([*one.named_parameters(), *one.named_buffers()]) for one in (loaded.model, want))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    return blocks


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_sharded_checkpoint_is_loaded_whole(saved: Callable[..., Path], dtype: str) -> None:
    folder = saved("Qwen2ForCausalLM", transformers.Qwen2Config(**SMALL), max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    blocks = same_as_transformers(folder, "logprobs", dtype)
    assert len(blocks.sizes) == 1


def test_a_shard_that_is_missing_is_named(saved: Callable[..., Path]) -> None:
    folder = saved("Qwen2ForCausalLM", transformers.Qwen2Config(**SMALL), max_shard_size="40KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=rf"cannot be loaded: model\.safetensors\.index\.json names {gone.name}, which is not in"):
        loading.load(folder, "logprobs", "auto", Blocks())


def test_tied_weights_are_held_once(saved: Callable[..., Path]) -> None:
    blocks = same_as_transformers(
        saved("Qwen2ForCausalLM", transformers.Qwen2Config(**SMALL, tie_word_embeddings=True)), "logprobs", "auto"
    )
    untied = weights.Layout.of(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, tie_word_embeddings=False)))
    assert blocks.sizes[0] <= untied.size_bytes - 512 * 32 * 4


def test_weights_that_transformers_puts_together_from_several_are_loaded(saved: Callable[..., Path]) -> None:
    # Given a mixture of experts, which is stored expert by expert and held as one tensor
    folder = saved("MixtralForCausalLM", transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
    same_as_transformers(folder, "logprobs", "bfloat16")


def test_weights_that_stay_in_float32_in_a_model_of_less_are_not_rounded(saved: Callable[..., Path]) -> None:
    # Given a kind of model of which some weights are always held in float32
    config = transformers.T5Config(
        vocab_size=512, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, num_labels=1, pad_token_id=0, eos_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    folder = saved("T5ForSequenceClassification", config)
    # Then the size of its block is known when it has been read once
    first, second = same_as_transformers(folder, "score", "float16").sizes
    assert second > first


def test_a_tensor_in_another_ones_place_is_moved_and_not_lost() -> None:
    module = torch.nn.ParameterList([torch.ones(300), torch.zeros(300)]).requires_grad_(False)
    layout = weights.Layout.of(module)
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    first, second = layout.views(block).values()
    # Given two tensors, each in the other's place
    first.fill_(2.0)
    second.fill_(1.0)
    module[0].data, module[1].data = second, first
    layout.take(module, block)
    layout.fill(module, block)
    assert (float(module[0].mean()), float(module[1].mean())) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("keys", "held"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float32"}, "float32"),
        ({"dtype": None}, "float16"),
    ],
)
def test_the_dtype_is_what_the_checkpoint_says_or_its_first_tensor_has(
    saved: Callable[..., Path], keys: dict[str, object], held: str
) -> None:
    folder = saved("Qwen2ForCausalLM", transformers.Qwen2Config(**SMALL))
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    loaded = loading.load(changed(folder, **keys), "logprobs", "auto", Blocks())
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, held)}


def test_a_dtype_that_no_engine_computes_in_is_refused_unless_another_is_declared(saved: Callable[..., Path]) -> None:
    folder = changed(saved("Qwen2ForCausalLM", transformers.Qwen2Config(**SMALL)), dtype="float64")
    with pytest.raises(ConfigError, match="config.json says dtype 'float64': declare dtype as one of float32, bfloat16, float16"):
        loading.load(folder, "logprobs", "auto", Blocks())
    loading.load(folder, "logprobs", "bfloat16", Blocks())


def test_pickled_and_quantized_weights_are_refused(saved: Callable[..., Path]) -> None:
    folder = saved("Qwen2ForCausalLM", transformers.Qwen2Config(**SMALL))
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    with pytest.raises(ConfigError, match='is quantized, which the torch engine does not load: use engine = "vllm"'):
        loading.load(changed(folder, quantization_config=quantized), "logprobs", "auto", Blocks())
    changed(folder, quantization_config=None)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="has pickled weights only, which are not read: convert them to safetensors"):
        loading.load(folder, "logprobs", "auto", Blocks())
