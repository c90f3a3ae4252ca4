"""The services file: what is read, and how what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.services_file import ConfigError, ServicesFile, check_models, load_services_file
from workers.start import THREADS

GOOD = """
[services.rm-small]
engine = "torch"
task = "score"
model = "models/rm-small"
cells = [1, 2]
memory_mb = 200
max_concurrency = 3
restore_s = 0.5

[quotas.search]
rate_per_s = 50
concurrency = 20
"""

VLLM = '[services.a]\nengine = "vllm"\ntask = "score"\nmodel = "m"\nmemory_mb = 1\n'


def read(tmp_path: Path, text: str) -> ServicesFile:
    file = tmp_path / "services.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return load_services_file(file)


def said(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{tmp_path / 'services.toml'}: ")
    return message


def test_a_good_file_is_read_with_model_folders_relative_to_it(tmp_path: Path) -> None:
    file = read(tmp_path, GOOD)
    service, quota = file.services["rm-small"], file.quotas["search"]
    assert service.model == tmp_path / "models" / "rm-small"
    assert (service.engine, service.task, service.cells, service.memory_mb) == ("torch", "score", [1, 2], 200.0)
    assert (service.max_concurrency, service.restore_s) == (3, 0.5)
    assert (quota.rate_per_s, quota.concurrency, quota.burst) == (50.0, 20, None)


def test_a_quota_may_limit_tokens_name_its_hosts_and_share_an_account(tmp_path: Path) -> None:
    text = """
    quotas.a = {account = "x", tokens_per_min = 600, usage_header = "X-Cost", hosts = ["*.example.com", "10.1.0.0/16"]}
    quotas.b = {account = "x"}
    quotas.c = {concurrency = 1}
    """
    first, second, third = read(tmp_path, text).quota_specs(lead_s=0.1)
    assert (first.tokens_per_min, first.usage_header, first.margin, first.lead_s) == (600.0, "X-Cost", 0.03, 0.1)
    assert (second.account, second.limits, third.account) == ("x", False, None)
    assert (first.hosts, second.hosts) == (("*.example.com", "10.1.0.0/16"), ())


def test_quotas_that_cannot_share_an_account_are_refused(tmp_path: Path) -> None:
    shared = '[quotas.a]\naccount = "x"\nrate_per_s = 5\n[quotas.b]\naccount = "x"\n'
    assert "quotas.b: account 'x' has other limits in quota 'a'" in said(tmp_path, shared + "rate_per_s = 6")
    assert "quotas.c: must limit something" in said(tmp_path, shared + '[quotas.c]\naccount = "y"')


def test_a_worker_has_a_thread_for_each_call_that_eight_cells_take_at_a_time(tmp_path: Path) -> None:
    service = read(tmp_path, VLLM).services["a"]
    assert THREADS["gpu"] > 8 * service.max_concurrency


def test_templates_adapters_and_interpreters_are_relative_to_the_file(tmp_path: Path) -> None:
    service = read(tmp_path, VLLM + 'adapter = "lora"\nchat_template = "chat.jinja"\nvllm.python = "venv/bin/python"').services["a"]
    assert (service.adapter, service.chat_template) == (tmp_path / "lora", tmp_path / "chat.jinja")
    assert service.vllm.python == tmp_path / "venv/bin/python"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("restore_s = 0.5", 'score_template = "{prompt}"', "services.rm-small.score_template: must have {response} once"),
        ("restore_s = 0.5", 'score_template = "{prompt}{response}{prompt}"', "services.rm-small.score_template: must have {prompt} once"),
        ("restore_s = 0.5", 'score_template = "{prompt}{response}"\nseparator = " "', "separator: means nothing beside score_template"),
        ('task = "score"', 'task = "logprobs"\nchat_template = "chat.jinja"', "chat_template: means nothing with task 'logprobs'"),
        ("restore_s = 0.5", 'adapter = "lora"', "services.rm-small: adapter: the torch engine loads none: use engine 'vllm', or"),
        ("max_concurrency = 3", "vllm = {}", "services.rm-small: vllm: means nothing with engine 'torch'"),
        ('engine = "torch"', 'engine = "magic"', "services.rm-small.engine: "),
        ('task = "score"', "", "services.rm-small.task: Field required"),
        ('model = "models/rm-small"', "", "services.rm-small: model: the torch engine needs a model folder"),
        ("cells = [1, 2]", "cells = []", "services.rm-small.cells: must be ascending"),
        ("cells = [1, 2]", "cells = [1, 3]", "services.rm-small.cells: must be ascending"),
        ("cells = [1, 2]", "cells = [true]", "services.rm-small.cells.0: "),
        ("memory_mb = 200", "memory_mb = nan", "services.rm-small.memory_mb: "),
        ("memory_mb = 200", 'memory_mb = "200"', "services.rm-small.memory_mb: "),
        ("restore_s = 0.5", "restore_s = -1", "services.rm-small.restore_s: "),
        ("restore_s = 0.5", "speed = 9", "services.rm-small.speed: Extra inputs are not permitted"),
        ("rate_per_s = 50\nconcurrency = 20", "", "quotas.search: must limit something"),
        ("rate_per_s = 50", "burst = 5", "quotas.search: burst: means nothing without rate_per_s"),
        ("rate_per_s = 50", 'rate_per_s = 50\nhosts = ["a/b"]', "quotas.search.hosts: 'a/b' is no host name, address or network"),
        ("rate_per_s = 50", "rate_per_s = 50\nhosts = []", "quotas.search.hosts: "),
        ("[quotas.search]", '[quotas."two words"]', "a name must be letters"),
        ("[quotas.search]", '[quotas."two\\nlines"]', "a name must be letters"),
        ("[quotas.search]", "[quotes.search]", "quotes: Extra inputs are not permitted"),
        ("[quotas.search]", "[quotas.search", "is not TOML: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_table_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert expected in said(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ('args = ["--port", "80"]', "args: --port"),
        ('args = ["--served_model_name=x"]', "args: --served-model-name"),
        ('args = ["--no-enable-sleep-mode"]', "args: --no-enable-sleep-mode"),
        ('env = {CUDA_VISIBLE_DEVICES = "1"}', "env: CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_the_workers_to_say_is_refused(tmp_path: Path, line: str, option: str) -> None:
    assert f"services.a.vllm: {option} is set by the worker" in said(tmp_path, f"{VLLM}[services.a.vllm]\n{line}")


def test_more_than_one_problem_is_counted(tmp_path: Path) -> None:
    two = GOOD.replace("memory_mb = 200", "memory_mb = -1").replace("restore_s = 0.5", "restore_s = -1")
    assert said(tmp_path, two).endswith("(and 1 more)")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "declares neither a service nor a quota"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (None, r"services\.toml: cannot be read: No such file"),
    ],
    ids=["empty", "nested", "no text", "missing"],
)
def test_a_file_that_is_no_services_file_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "services.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_services_file(tmp_path / "services.toml")


def problem(file: ServicesFile, tmp_path: Path) -> str:
    """Return what is wrong with the folders that a file names."""
    with pytest.raises(ConfigError) as caught:
        check_models(tmp_path / "services.toml", file)
    return str(caught.value)


def test_a_model_folder_is_looked_into_and_the_first_lack_is_said(tmp_path: Path) -> None:
    file, folder = read(tmp_path, GOOD), tmp_path / "models" / "rm-small"
    start = f"{tmp_path / 'services.toml'}: services.rm-small.model: {folder} "
    assert problem(file, tmp_path) == start + "does not exist"
    folder.parent.mkdir()
    folder.write_text("a file")
    assert problem(file, tmp_path) == start + "is a file, not a model folder"
    folder.unlink()
    folder.mkdir()
    assert problem(file, tmp_path) == start + "has no config.json"
    (folder / "config.json").write_text("{}")
    assert problem(file, tmp_path) == start + "has no weights (*.safetensors)"
    (folder / "model.safetensors").write_bytes(b"")
    check_models(tmp_path / "services.toml", file)
    # And so are adapters and templates
    table = VLLM.replace('"m"', f'"{folder}"')
    for line, lack in (('adapter = "lora"', "lora has no adapter_config.json"), ('chat_template = "chat.jinja"', "chat.jinja is no file")):
        assert problem(read(tmp_path, table + line), tmp_path).endswith(f"services.a.{line.split()[0]}: {tmp_path}/{lack}")


values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(
    ["engine", "task", "model", "cells", "memory_mb", "max_concurrency", "restore_s", "dtype", "separator", "adapter", "x"]
)


tables = st.builds(
    lambda name, table: f"[services.{json.dumps(name)}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()),
    st.text(max_size=8),
    st.dictionaries(keys, values, max_size=6),
)
texts = tables | st.text(max_size=200).map(lambda text: GOOD + text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(texts.map(lambda text: text.encode("utf-8", "replace")) | st.binary(max_size=200))
def test_anything_is_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "services.toml"
    path.write_bytes(content)
    try:
        file = load_services_file(path)
    except ConfigError as error:
        message = str(error)
        assert message.startswith(str(path)) and message.isprintable() and len(message) < 1500
    else:
        assert file.services or file.quotas
