"""A real reward model and a real teacher behind real vLLM servers, which share one cell of a whole stack.

Without `.venv-vllm` the tests are skipped; with CI set, that is a failure. They share one stack, and each may begin with
either server awake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.reference import real_python
from tests.vllm.system import System, services_toml, system

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ITEMS = [{"prompt": f"Question {index}: what is {index} + 2?", "response": f"It is {index + 2}. " * (1 + index % 5)} for index in range(20)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[System]:
    python, folder = real_python(), tmp_path_factory.mktemp("vllm")
    (folder / "services.toml").write_text(services_toml(models, python, {}))
    with system(folder / "state", folder / "services.toml") as up:
        yield up


def test_a_server_that_was_evicted_sleeps_hangs_on_questions_and_is_woken_before_it_is_asked(stack: System) -> None:
    before = stack.client.score("rm", ITEMS)
    stack.client.logprobs("teacher", [[1, 2, 3]])
    assert stack.sleeps("rm") and not stack.sleeps("teacher")
    server = stack.server("rm").pid
    # What the guards are for: nothing but `/is_sleeping` tells that this server will not answer.
    stack.ask("rm", "GET", "/v1/models")
    with pytest.raises(httpx.ReadTimeout):
        stack.ask("rm", "POST", "/classify", {"model": "rm", "input": [[1, 2]]}, timeout_s=1.0)
    assert stack.client.score("rm", ITEMS) == before
    assert stack.sleeps("teacher") and not stack.sleeps("rm")
    assert stack.server("rm").pid == server


def test_a_server_whose_engine_is_killed_at_work_is_started_once_and_every_action_is_done(stack: System) -> None:
    before = stack.client.score("rm", ITEMS)
    killed = stack.server("rm").pid
    answers = stack.kill_while_it_works(stack.core("rm"), [lambda: stack.client.score("rm", ITEMS)] * 12)
    for answer in answers:
        assert answer == pytest.approx(before, abs=1e-4)
    assert stack.server("rm").pid != killed
    (log,) = (stack.live.stack.state_dir / "services").glob("vllm-rm-*.log")
    # Each start sets the log of the one before aside: that one is the killed server's, so there was one start.
    assert f"pid={killed})" in log.with_name(log.name + ".1").read_text()
    stack.live.until(lambda: stack.ends().keys() == {"succeeded"})
