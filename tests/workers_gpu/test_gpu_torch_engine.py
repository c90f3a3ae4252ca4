"""The torch engine against plain transformers on the same weights."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from workers.gpu.call_control import CallControl  # noqa: E402
from workers.gpu.devices import Device  # noqa: E402
from workers.gpu.engines import compute, torch_hf  # noqa: E402
from workers.gpu.engines.texts import Wording  # noqa: E402
from workers.gpu.engines.torch_hf import TorchEngine  # noqa: E402
from workers.gpu.errors import BadInput, CallCancelled, EngineFailed, NotSupported  # noqa: E402
from workers.gpu.items import Reading, TokenLogprobs  # noqa: E402

CLOSE = 1e-4
ITEMS: list[dict[str, object]] = [
    {"prompt": "What is 2 + 3?", "response": "5"},
    {"prompt": "What is the capital of France?", "response": "Paris, of course. " * 8},
    {"prompt": "", "response": "x"},
    {"prompt": "def add(left, right):", "response": "    return left + right"},
    {"prompt": "ends with the padding token", "response": "so<|endoftext|>"},
]
SEQUENCES = [[5, 17, 33], [6, 17, 33, 40, 41, 300, 511, 0, 0, 12], [9], [0, 0], list(range(100, 200))]


def engine(models: Path, name: str, devices: list[Device], state: Path, **words: object) -> TorchEngine:
    made = TorchEngine(name, "score" if name == "rm-small" else "logprobs", models / name, state, **words)  # type: ignore[arg-type]
    made.start(devices)
    return made


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def one() -> list[Device]:
    return [Device("cpu:0", "cpu", 1000, "cpu")]


@pytest.fixture(scope="module")
def reward(models: Path, one: list[Device], state: Path) -> Iterator[TorchEngine]:
    made = engine(models, "rm-small", one, state, max_concurrency=4)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def teacher(models: Path, one: list[Device], state: Path) -> Iterator[TorchEngine]:
    made = engine(models, "teacher-0", one, state, max_concurrency=4)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def plain_scores(models: Path) -> Callable[[list[str]], list[float]]:
    """Return a scorer that reads every text by itself, all positions, and takes the logit of the last."""
    folder = models / "rm-small"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    # Without a padding id, transformers itself takes the last position of a single text.
    model.config.pad_token_id = None

    def score(texts: list[str]) -> list[float]:
        with torch.no_grad():
            return [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]

    return score


@pytest.fixture(scope="module")
def plain_logprobs(models: Path) -> Callable[[list[int]], list[float]]:
    """Return log-probs read one prefix at a time, so that nothing after an id can have a say."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "teacher-0", dtype=torch.float32).eval()

    def logprobs(ids: list[int]) -> list[float]:
        out = []
        with torch.no_grad():
            for end in range(1, len(ids)):
                last = model(torch.tensor([ids[:end]])).logits[0, -1]
                out.append(float(torch.log_softmax(last, dim=-1)[ids[end]]))
        return out

    return logprobs


def test_scores_are_the_raw_logits_of_plain_transformers(reward: TorchEngine, plain_scores: Callable[[list[str]], list[float]]) -> None:
    scores = reward.score(ITEMS)

    assert scores == pytest.approx(plain_scores([f"{item['prompt']}\n{item['response']}" for item in ITEMS]), abs=CLOSE)
    assert max(scores) - min(scores) > 0.1


def test_log_probs_are_those_of_plain_transformers(teacher: TorchEngine, plain_logprobs: Callable[[list[int]], list[float]]) -> None:
    answers = teacher.logprobs(SEQUENCES)

    assert [len(values) for values in answers] == [len(ids) - 1 for ids in SEQUENCES]
    for values, ids in zip(answers, SEQUENCES, strict=True):
        assert values == pytest.approx(plain_logprobs(ids), abs=CLOSE)


def test_another_first_token_moves_log_probs_by_more_than_1(teacher: TorchEngine) -> None:
    rest = list(range(20, 60))

    first, second = teacher.logprobs([[5, *rest], [400, *rest]])

    assert max(abs(a - b) for a, b in zip(first[1:], second[1:], strict=True)) > 1.0


def test_another_last_token_moves_no_earlier_log_prob(teacher: TorchEngine) -> None:
    first, second = teacher.logprobs([[5, 6, 7, 8], [5, 6, 7, 400]])

    assert first[:-1] == pytest.approx(second[:-1], abs=CLOSE)
    assert abs(first[-1] - second[-1]) > CLOSE


few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=25)


@few
@given(st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=40), max_size=9))
def test_a_batch_gives_the_log_probs_of_one_by_one(teacher: TorchEngine, sequences: list[list[int]]) -> None:
    together = teacher.logprobs(sequences)

    for values, ids in zip(together, sequences, strict=True):
        assert values == pytest.approx(teacher.logprobs([ids])[0], abs=CLOSE)


@few
@given(st.lists(st.tuples(st.text(max_size=20), st.text(min_size=1, max_size=60)), max_size=9))
def test_a_batch_gives_the_scores_of_one_by_one(reward: TorchEngine, pairs: list[tuple[str, str]]) -> None:
    items = [
        {"prompt": prompt.encode("utf-8", "replace").decode(), "response": response.encode("utf-8", "replace").decode()}
        for prompt, response in pairs
    ]

    together = reward.score(items)

    assert together == pytest.approx([reward.score([item])[0] for item in items], abs=CLOSE)


def test_small_batches_give_the_same_answers_in_the_same_order(teacher: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = teacher.logprobs(SEQUENCES)

    monkeypatch.setattr(torch_hf, "_BATCH_TOKENS", 8)

    for values, expected in zip(teacher.logprobs(SEQUENCES), whole, strict=True):
        assert values == pytest.approx(expected, abs=CLOSE)


def test_a_conversation_is_written_by_the_chat_template(reward: TorchEngine, plain_scores: Callable[[list[str]], list[float]]) -> None:
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 3?"}]
    answer = [{"role": "assistant", "content": "5"}]

    scores = reward.score([{"prompt": asked, "response": answer}, {"prompt": asked, "response": "5"}])

    expected = plain_scores(["<|system|>Be short.\n<|user|>2 + 3?\n<|assistant|>5\n"])
    assert scores == pytest.approx(expected * 2, abs=CLOSE)


def test_the_separator_between_plain_texts_can_be_chosen(
    models: Path, one: list[Device], state: Path, plain_scores: Callable[[list[str]], list[float]]
) -> None:
    made = engine(models, "rm-small", one, state, wording=Wording(separator=" => "))

    assert made.score([{"prompt": "a", "response": "b"}]) == pytest.approx(plain_scores(["a => b"]), abs=CLOSE)


def test_a_score_template_puts_plain_texts_together(
    models: Path, one: list[Device], state: Path, plain_scores: Callable[[list[str]], list[float]]
) -> None:
    made = engine(models, "rm-small", one, state, wording=Wording(score_template="Q: {prompt} A: {response}!"))

    scores = made.score([{"prompt": "a {response}", "response": "{prompt}"}])

    assert scores == pytest.approx(plain_scores(["Q: a {response} A: {prompt}!"]), abs=CLOSE)


def test_a_whole_text_is_scored_as_it_is(
    models: Path, one: list[Device], state: Path, plain_scores: Callable[[list[str]], list[float]]
) -> None:
    made = engine(models, "rm-small", one, state, wording=Wording(score_template="Q: {prompt} A: {response}!"))

    assert made.score([{"response": "2 + 3 = 5"}]) == pytest.approx(plain_scores(["2 + 3 = 5"]), abs=CLOSE)


def test_a_conversation_is_written_by_the_services_own_template_if_it_has_one(
    models: Path, one: list[Device], state: Path, tmp_path: Path, plain_scores: Callable[[list[str]], list[float]]
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}")
    made = engine(models, "rm-small", one, state, wording=Wording(chat_template=file))

    scores = made.score([{"prompt": [{"role": "user", "content": "2 + 3?"}], "response": "5"}])

    assert scores == pytest.approx(plain_scores(["[user] 2 + 3?[assistant] 5"]), abs=CLOSE)


def test_a_chat_template_that_cannot_be_read_is_named(models: Path, one: list[Device], state: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=rf"chat_template: {tmp_path}/none cannot be read"):
        engine(models, "rm-small", one, state, wording=Wording(chat_template=tmp_path / "none"))


def test_a_model_larger_than_its_cell_is_refused_before_it_is_read(models: Path, state: Path, tmp_path: Path) -> None:
    # Given a model of 0.4 MiB whose file is damaged after the header
    folder = broken(models, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    made = TorchEngine("rm", "score", folder, state)

    # Then a device that is too small for it is refused, with what to do
    with pytest.raises(EngineFailed, match=r'rm: .*its weights take 0\.4 MiB and cpu:0 has 0: they need engine = "vllm", which splits'):
        made.start([Device("cpu:0", "cpu", 0, "cpu")])
    # And so is less memory than the weights alone take
    with pytest.raises(
        EngineFailed, match=r"its weights alone take 0\.4 MiB of each cell, and there is room for 0\.1: declare more memory_mb, or"
    ):
        made.start([Device("cpu:0", "cpu", 1000, "cpu")], 0.1)
    # And with enough memory the file is read
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        made.start([Device("cpu:0", "cpu", 1000, "cpu")])


def test_a_conversation_without_a_chat_template_is_refused(models: Path, one: list[Device], state: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models / "rm-small", tmp_path / "rm-small"))
    (folder / "chat_template.jinja").unlink()
    made = engine(tmp_path, "rm-small", one, state)

    with pytest.raises(BadInput, match=r"items\[1\]: the model has no chat template"):
        made.score([ITEMS[0], {"prompt": [{"role": "user", "content": "hi"}], "response": "x"}])


def test_replicas_on_several_cells_share_a_batch_and_agree_with_one(
    models: Path, teacher: TorchEngine, one: list[Device], state: Path
) -> None:
    spread = engine(models, "teacher-0", one * 3, state)

    answers = spread.logprobs(SEQUENCES)

    for values, expected in zip(answers, teacher.logprobs(SEQUENCES), strict=True):
        assert values == pytest.approx(expected, abs=CLOSE)
    assert spread.memory_mb() == pytest.approx(3 * teacher.memory_mb())


def test_greedy_generation_follows_the_most_likely_token(teacher: TorchEngine, models: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "teacher-0")
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "teacher-0", dtype=torch.float32).eval()
    prompts = ["def add(left", "What is"]

    texts = teacher.generate(prompts, max_tokens=12)

    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(whole, skip_special_tokens=True)


def test_a_conversation_is_continued_as_its_template_writes_it(teacher: TorchEngine) -> None:
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 3?"}]

    assert teacher.generate([asked], 12) == teacher.generate(["<|system|>Be short.\n<|user|>2 + 3?\n"], 12)


def test_sampling_repeats_with_its_seed_and_tiny_temperatures_are_greedy(teacher: TorchEngine) -> None:
    first = teacher.generate(["What is"], 16, temperature=1.0, seed=7)

    assert first == teacher.generate(["What is"], 16, temperature=1.0, seed=7)
    assert first != teacher.generate(["What is"], 16, temperature=1.0, seed=8)
    assert teacher.generate(["What is"], 16, temperature=1e-300) == teacher.generate(["What is"], 16)


def test_empty_requests_get_empty_answers(reward: TorchEngine, teacher: TorchEngine) -> None:
    assert (reward.score([]), teacher.logprobs([]), teacher.generate([])) == ([], [], [])


def test_inputs_the_model_cannot_read_are_refused_by_index(reward: TorchEngine, teacher: TorchEngine) -> None:
    with pytest.raises(BadInput, match=r"sequences\[1\]: token id 512 is outside the vocabulary of 512"):
        teacher.logprobs([[1, 2], [3, 512]])
    with pytest.raises(BadInput, match=r"sequences\[1\]: 513 tokens, the model reads at most 512"):
        teacher.logprobs([[1, 2], [1] * 513])
    with pytest.raises(BadInput, match=r"sequences\[0\]: List should have at least 1 item"):
        teacher.logprobs([[]])
    with pytest.raises(BadInput, match=r"items\[1\]: \d+ tokens, the model reads at most 512"):
        reward.score([ITEMS[0], {"prompt": "0 1 " * 400, "response": "x"}])
    with pytest.raises(BadInput, match=r"prompts\[1\]: has no tokens"):
        teacher.generate(["a", ""])
    with pytest.raises(BadInput, match=r"prompts\[0\]: 1 tokens and 512 to come, the model reads at most 512"):
        teacher.generate(["a"], max_tokens=512)
    with pytest.raises(BadInput, match=r"prompts\[0\]: is no text: character 1 is half of a surrogate pair"):
        teacher.generate(["a\ud800"])
    with pytest.raises(BadInput, match=r"items\[0\]\.prompt.*half of a surrogate pair"):
        reward.score([{"prompt": [{"role": "user", "content": "\udfff"}], "response": "x"}])
    with pytest.raises(BadInput, match=r"items\[0\]\.response.*half of a surrogate pair"):
        reward.score([{"prompt": "a", "response": "\ud800"}])
    assert len(teacher.logprobs([[1] * 512])[0]) == 511


def test_a_model_takes_no_pretended_time(reward: TorchEngine) -> None:
    with pytest.raises(NotSupported, match="work_s"):
        reward.score(ITEMS, CallControl(work_s=1.0))


def test_a_cancelled_call_ends_after_its_batch(teacher: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    control, batches = CallControl(), []
    real = compute.logprobs

    def cancelled_in_the_middle(*words: object) -> list[TokenLogprobs]:
        batches.append(1)
        control.cancelled.set()
        return real(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(compute, "logprobs", cancelled_in_the_middle)
    monkeypatch.setattr(torch_hf, "_BATCH_TOKENS", 8)

    with pytest.raises(CallCancelled):
        teacher.logprobs(SEQUENCES, control)
    assert len(batches) == 1


def test_many_threads_get_the_answers_of_one(reward: TorchEngine, teacher: TorchEngine) -> None:
    scores, logprobs = reward.score(ITEMS), teacher.logprobs(SEQUENCES)

    with ThreadPoolExecutor(8) as pool:
        scored = [pool.submit(reward.score, ITEMS) for _ in range(24)]
        given_out = [pool.submit(teacher.logprobs, SEQUENCES) for _ in range(24)]

        assert all(call.result(timeout=120) == pytest.approx(scores, abs=CLOSE) for call in scored)
        for call in given_out:
            for values, expected in zip(call.result(timeout=120), logprobs, strict=True):
                assert values == pytest.approx(expected, abs=CLOSE)


def test_callers_at_once_have_one_text_at_a_time_continued(teacher: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = teacher.generate(["What is", "def add"], max_tokens=6)
    real, working, most = compute.generate, threading.Semaphore(1), []

    def counted(*words: object) -> list[int]:
        most.append(working.acquire(blocking=False))
        try:
            return real(*words)  # type: ignore[arg-type]
        finally:
            working.release()

    monkeypatch.setattr(compute, "generate", counted)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(teacher.generate, ["What is", "def add"], 6) for _ in range(4)]
        assert [call.result(120) for call in asked] == [alone] * 4
    assert most == [True] * 8


def test_calls_that_wait_are_computed_in_one_batch_and_bad_input_harms_nobody(
    teacher: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the answers of calls that are made alone
    calls = [[[5, 17, 33]], [[6, 17, 33, 40, 41]], [[9, 300], list(range(50))]]
    alone = [teacher.logprobs(sequences) for sequences in calls]
    # And a call that holds the device
    began, gate, batches = threading.Event(), threading.Event(), []
    real = compute.logprobs

    def slow(model: object, batch: list[Reading]) -> list[TokenLogprobs]:
        batches.append(len(batch))
        began.set()
        assert gate.wait(60)
        return real(model, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(compute, "logprobs", slow)
    monkeypatch.setattr(teacher, "_limit", 5)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(teacher.logprobs, [[1, 2]])
        assert began.wait(60)
        # When others wait for it, one of them with an id that the model does not know
        asked = [pool.submit(teacher.logprobs, sequences) for sequences in calls]
        with pytest.raises(BadInput, match=r"sequences\[0\]: token id 512"):
            teacher.logprobs([[3, 512]])
        while len(teacher._sequences._calls) < 4:
            pass
        gate.set()
        # Then they are computed together, and each gets what it gets alone
        assert len(first.result(120)[0]) == 1
        for call, expected in zip(asked, alone, strict=True):
            for values, wanted in zip(call.result(120), expected, strict=True):
                assert values == pytest.approx(wanted, abs=CLOSE)
    assert batches == [1, 4]


def broken(models: Path, tmp_path: Path, name: str = "rm-small") -> Path:
    return Path(shutil.copytree(models / name, tmp_path / name))


def failure(folder: Path, task: str, one: list[Device], state: Path) -> str:
    made = TorchEngine("rm", task, folder, state)  # type: ignore[arg-type]
    with pytest.raises(EngineFailed) as caught:
        made.start(one)
    message = str(caught.value)
    assert made.state == "failed"
    assert made.memory_mb() == 0.0
    assert made.failure in message
    assert len(message.splitlines()) == 1
    return message


def test_a_folder_that_is_none_is_said_in_one_line(tmp_path: Path, one: list[Device], state: Path) -> None:
    assert "rm: starting failed: " in failure(tmp_path / "nowhere", "score", one, state)
    assert f"{tmp_path} has no config.json" in failure(tmp_path, "score", one, state)


def test_the_wrong_kind_of_model_is_refused_and_not_filled_with_random_weights(models: Path, one: list[Device], state: Path) -> None:
    assert "no fitting weights for score.weight" in failure(models / "teacher-0", "score", one, state)
    assert "no fitting weights for lm_head.weight" in failure(models / "rm-small", "logprobs", one, state)


def test_weights_of_another_architecture_are_refused_though_none_are_missing(
    models: Path, tmp_path: Path, one: list[Device], state: Path
) -> None:
    # Given a Qwen2, whose attention has biases, that says it is a Llama, whose attention has none
    folder = broken(models, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="llama", architectures=["LlamaForSequenceClassification"])
    (folder / "config.json").write_text(json.dumps(config))

    assert "weights of another architecture than its config.json names: model.layers.0.self_attn" in failure(folder, "score", one, state)


def test_a_classifier_with_several_labels_is_refused(models: Path, tmp_path: Path, one: list[Device], state: Path) -> None:
    folder = broken(models, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.update(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    (folder / "config.json").write_text(json.dumps(config))

    assert f"{folder} has 2 labels: a reward model has one" in failure(folder, "score", one, state)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"{}"),
        ("config.json", b'{"model_type": "nobody-knows"}'),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("tokenizer.json", b"{}"),
    ],
)
def test_a_damaged_file_is_said_in_one_line(
    models: Path, tmp_path: Path, one: list[Device], state: Path, file: str, content: bytes
) -> None:
    folder = broken(models, tmp_path)
    (folder / file).write_bytes(content)

    assert failure(folder, "score", one, state).startswith(f"rm: starting failed: {folder} cannot be loaded: ")


def test_a_model_that_brings_its_own_code_is_refused(models: Path, tmp_path: Path, one: list[Device], state: Path) -> None:
    folder = broken(models, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="mine", auto_map={"AutoConfig": "code.C", "AutoModelForSequenceClassification": "code.M"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    failure(folder, "score", one, state)

    assert not (tmp_path / "ran").exists()


def test_half_precision_is_held_in_half_the_memory(models: Path, reward: TorchEngine, one: list[Device], state: Path) -> None:
    half = engine(models, "rm-small", one, state, dtype="bfloat16")

    assert half.memory_mb() == pytest.approx(reward.memory_mb() / 2, rel=0.05)
    assert half.score(ITEMS) == pytest.approx(reward.score(ITEMS), abs=0.5)
