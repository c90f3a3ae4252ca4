"""An engine behind a server that works: how it is started, what it answers, how it goes and comes back."""

from __future__ import annotations

import json
import shutil
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines import fixtures
from tests.vllm.fakes import CPU, CUDA, Fake, fake_python, gone, summed, until
from workers.gpu.engines import canary
from workers.gpu.engines.vllm import questions
from workers.gpu.errors import BadInput, CallFailed, EngineDied, EngineFailed, NotResident
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName

CANARY = len(canary.questions(512, 512))
ITEMS = [{"prompt": f"question {index}", "response": "yes " * (index % 7)} for index in range(30)]


def expected_scores(models: Path, template: str = "{prompt}\n{response}") -> list[float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "rm-small")
    return [summed(tokenizer(template.format(**item))["input_ids"]) for item in ITEMS]


def test_scores_come_in_the_order_of_the_items_from_requests_no_larger_than_the_server_takes_at_once(fake: Fake) -> None:
    engine = fake.started()
    assert engine.score(ITEMS) == pytest.approx(expected_scores(fake.models), abs=0)
    asked = [int(line.split()[1]) for line in fake.noted("/classify")][CANARY:]
    assert sorted(asked) == [6, 8, 8, 8]


def test_many_most_likely_ids_come_in_several_answers(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.started("logprobs")
    monkeypatch.setattr(questions, "MOST_ENTRIES", 100)
    before = len(fake.noted("/v1/completions"))
    found = engine.ranked([[token, 3, 4, 5] for token in range(6)], 8)
    assert [len(said.top_ids) for said in found] == [24] * 6
    # 100 // (1 + 8) tokens in each: two sequences
    assert fake.noted("/v1/completions")[before:] == ["/v1/completions 2"] * 3


def test_more_than_the_servers_own_bound_is_refused_in_one_line_and_never_sent(fake: Fake) -> None:
    engine = fake.started("logprobs", vllm={"args": ["--max-logprobs", "20"]})
    before = fake.journal()
    with pytest.raises(BadInput, match=r"^top_k: must be at most 20, the --max-logprobs of services\.rm\.vllm\.args$"):
        engine.ranked([[1, 2]], 21)
    assert fake.journal() == before
    assert len(engine.ranked([[1, 2]], 20)[0].top_ids) == 20


def test_an_interpreter_without_vllm_is_named_at_the_first_start(fake: Fake, tmp_path: Path) -> None:
    fake_python(tmp_path, has_vllm=False)
    for python, words in ((fake.python, f"there is no vllm in the environment of {fake.python}"), (tmp_path / "none", ".* cannot be run")):
        with pytest.raises(EngineFailed, match=rf"services\.rm\.vllm\.python: {words}"):
            fake.started(vllm={"python": python})


def test_a_server_that_ends_before_it_answers_is_noticed_at_once_and_quoted_though_its_exit_code_is_0(fake: Fake) -> None:
    fake.be("exit0")
    engine = fake.engine(vllm={"start_timeout_s": 3600.0})
    with pytest.raises(EngineFailed, match="ended with exit code 0 before it answered: ValueError: head size 16 is not supported"):
        engine.start(CUDA[:1])
    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)


def test_a_server_that_never_answers_is_ended_in_time(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = count(1)

    def clock() -> float:
        """Jump by an hour at each look, once the server runs."""
        return time.monotonic() + 3600.0 * (next(hours) if (fake.folder / "child").exists() else 0)

    fake.be("deaf")
    engine = fake.engine(vllm={"start_timeout_s": 1800.0})
    monkeypatch.setattr("workers.gpu.engines.vllm.engine.time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with pytest.raises(EngineFailed, match="did not answer within 1800 s"):
        engine.start(CUDA[:1])
    assert gone(fake.servers()[0]) and gone(fake.read("child"))


def test_a_server_is_there_only_once_it_has_answered_a_question(fake: Fake) -> None:
    fake.be("hang")
    engine = fake.engine()
    thread = threading.Thread(target=lambda: engine.start(CUDA[:1]))
    thread.start()
    until(lambda: fake.noted("/classify"))
    assert engine.state == "starting"
    with pytest.raises(NotResident):
        engine.score(ITEMS)
    fake.no_longer("hang")
    thread.join()
    assert engine.state == "resident"


def test_an_evicted_server_sleeps_with_its_weights_in_host_memory_and_is_woken_on_its_own_devices_before_it_is_asked(fake: Fake) -> None:
    engine = fake.started()
    assert engine.host_mb() == 0.0
    engine.evict()
    assert engine.can_restore(CUDA[:1]) and not engine.can_restore(CUDA[1:])
    engine.restore(CUDA[:1])
    engine.score(ITEMS)
    assert fake.noted("sleep", "wake", "ASLEEP") == ["sleep /sleep?level=1&mode=wait", "wake"]
    engine.evict()
    with pytest.raises(EngineFailed, match="was started on other devices"):
        engine.restore(CUDA[1:])


def test_on_cpu_devices_an_evicted_server_is_stopped_since_sleeping_would_free_nothing(fake: Fake) -> None:
    engine = fake.engine(cells=[1])
    engine.start(CPU)
    engine.evict()
    assert (engine.state, engine.memory_mb()) == ("absent", 0.0)
    assert gone(fake.servers()[0])
    assert not fake.noted("sleep")


def test_an_overloaded_server_is_asked_again_and_one_that_refuses_is_not(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.gpu.engines.vllm.api._PAUSE_S", 0.01)
    engine = fake.started()
    fake.be("busy", "1\n2\n3\n")
    assert len(engine.score(ITEMS[:1])) == 1
    fake.be("refuse")
    before = len(fake.journal())
    with pytest.raises(CallFailed, match="the server answers 400: .*not this one"):
        engine.score(ITEMS[:1])
    assert (len(fake.journal()), engine.state, engine.running) == (before + 1, "resident", 0)


def test_a_server_that_sleeps_behind_our_back_is_sent_nothing_and_not_relied_on(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.gpu.engines.vllm.engine._END_S", 0.1)
    engine = fake.started()
    before = fake.journal()
    fake.be("asleep")
    with pytest.raises(EngineDied, match="nobody here asked it to"):
        engine.score(ITEMS)
    assert fake.journal() == before
    assert engine.state == "failed" and gone(fake.servers()[0])


def changed(models: Path, folder: Path, name: str = "rm-small", **keys: object) -> Path:
    """Copy a model and say something else of it."""
    return fixtures.changed(Path(shutil.copytree(models / name, folder / name)), **keys)


@pytest.mark.parametrize(("declared", "given"), [("auto", "bfloat16"), ("float32", "float32")])
def test_the_dtype_is_that_of_the_checkpoint_or_as_declared(fake: Fake, models: Path, tmp_path: Path, declared: str, given: str) -> None:
    from workers.gpu.engines.vllm.reader import read_folder

    folder = changed(models, tmp_path, dtype="bfloat16")
    assert read_folder(folder, fake.config(model=folder, dtype=declared)).dtype == given


def test_a_reward_model_of_vllm_scores_by_the_last_token_under_a_template_of_the_service(fake: Fake, models: Path, tmp_path: Path) -> None:
    folder, template = changed(models, tmp_path, architectures=["Qwen2ForRewardModel"], dtype="float16"), "Q: {prompt} A: {response}"
    engine = fake.started(model=folder, vllm={"pooling": "reward"}, score_template=template)
    assert engine.score(ITEMS) == pytest.approx(expected_scores(models, template), abs=0)
    assert not fake.noted("/classify") and fake.argument("--dtype") == "float16"


@pytest.mark.parametrize(
    ("architecture", "pooling", "other"), [("RewardModel", "classify", "reward"), ("SequenceClassification", "reward", "classify")]
)
def test_a_model_of_another_pooling_than_declared_is_refused_with_what_to_declare(
    fake: Fake, models: Path, tmp_path: Path, architecture: str, pooling: str, other: str
) -> None:
    folder = changed(models, tmp_path, architectures=[f"Qwen2For{architecture}"])
    engine = fake.engine(model=folder, vllm={"pooling": pooling})
    with pytest.raises(EngineFailed, match=rf"is a Qwen2For{architecture}: declare vllm\.pooling = '{other}' for it, not '{pooling}'"):
        engine.start(CUDA[:1])
    assert not fake.servers()


def adapter(folder: Path, **keys: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **keys}))
    return folder


def test_questions_go_to_the_adapter_and_not_to_its_model(fake: Fake, tmp_path: Path) -> None:
    engine = fake.started("logprobs", adapter=adapter(tmp_path / "adapter", rank_pattern={"q_proj": 24}))
    assert engine.logprobs([[5, 17]]) == [[-summed([5, 17])]]
    assert fake.argument("--max-lora-rank") == "32"


def test_an_adapter_of_another_kind_is_refused_before_a_server_is_started(fake: Fake, tmp_path: Path) -> None:
    other, empty = adapter(tmp_path / "other", peft_type="IA3"), adapter(tmp_path / "empty", r=None)
    for folder, words in ((other, "is of type 'IA3': vLLM takes LORA"), (empty, "adapter_config.json of .* cannot be read")):
        with pytest.raises(EngineFailed, match=words):
            fake.engine("logprobs", adapter=folder).start(CUDA[:1])
    assert not fake.servers()


ALLOWED = 1e-4
"""What answers of the fake server, all of which are small, may differ by in float32."""


@pytest.mark.parametrize(
    ("task", "words", "noise", "wrong"),
    [
        ("score", {}, 1.1 * ALLOWED, 1),
        ("logprobs", {}, -0.9 * ALLOWED, 0),
        ("score", {"dtype": "bfloat16"}, 0.03, 0),
        ("score", {"vllm": {"args": ["--dtype=bfloat16"]}}, 0.03, 0),
    ],
)
def test_a_server_that_wakes_is_left_alone_up_to_the_noise_of_its_numbers_and_replaced_beyond(
    fake: Fake, task: str, words: dict[str, Any], noise: float, wrong: int
) -> None:
    host = ServiceHost(CUDA, {"rm": fake.config(task, **words)}, fake.folder, factory=fake.make, memory=fake.memory, drain_s=60.0)
    host.ensure_resident("rm", (0,))
    fake.be("spoilt", str(noise))
    host.evict(InstanceName("rm", (0,)))
    host.ensure_resident("rm", (0,))
    (status,) = host.status()
    assert (status.restores, status.wrong_answers, len(fake.servers())) == (1 - wrong, wrong, 1 + wrong)
