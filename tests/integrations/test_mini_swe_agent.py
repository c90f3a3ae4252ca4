"""mini-swe-agent, unchanged, on a stack: by the environment class, and by its own Docker environment with `tangram-docker`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from minisweagent.agents.default import DefaultAgent
from minisweagent.models.test_models import DeterministicModel, make_output

from examples.integrations.mini_swe_agent_fix import fix, open_class
from tangram import ActionCancelled, ActionFailed, Client
from tangram.integrations.mini_swe_agent import TangramEnvironment
from tests.clients.rows import shows
from tests.integrations.conftest import standing
from tests.live.support import Live

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("live")]


@pytest.fixture
def environment(live: Live) -> Iterator[TangramEnvironment]:
    with TangramEnvironment(timeout=60) as opened:
        yield opened


@shows("mini-swe-agent", "TangramEnvironment: a bug fixed by its agent")
def test_the_class_fixes_a_bug_and_leaves_no_environment(live: Live) -> None:
    environment = open_class()
    agent = fix(environment)
    environment.cleanup()
    seen = [message["content"] for message in agent.messages]
    assert "failed" in seen[5] and "<returncode>1</returncode>" in seen[5]
    assert "0 failed" in seen[-3]
    assert agent.messages[-1]["extra"]["exit_status"] == "Submitted" and "> longest" in agent.messages[-1]["extra"]["submission"]
    live.until(lambda: environment.id not in standing(live))


@shows("mini-swe-agent", "DockerEnvironment by MSWEA_DOCKER_EXECUTABLE=tangram-docker: the same bug")
def test_its_docker_environment_fixes_the_same_bug_by_tangram_docker(live: Live, executable: str) -> None:
    # mini-swe-agent reads the variable when it is imported
    variables = {**os.environ, "MSWEA_DOCKER_EXECUTABLE": executable, "MSWEA_SILENT_STARTUP": "1"}
    command = [sys.executable, "-m", "examples.integrations.mini_swe_agent_fix", "docker"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.index("<returncode>1<") < said.index("0 failed") < said.index("--- exit") and "> longest" in said.split("--- exit")[1]
    ((id,),) = live.rows("select id from environments where id like 'minisweagent-%'")
    live.until(lambda: id not in standing(live))


@shows("mini-swe-agent", "Environment.execute")
def test_nothing_of_a_command_but_its_files_is_left_to_the_next(environment: TangramEnvironment) -> None:
    environment.execute({"command": "cd / && export LEFT=1 && touch ~/file; exit 3"})
    seen = environment.execute({"command": "echo ${LEFT:-nothing}; ls ~; cat; exit 7"})
    assert seen == {"output": "nothing\nfile\n", "returncode": 7, "exception_info": ""}


@shows("mini-swe-agent", "Environment.execute")
def test_both_streams_are_one_in_the_order_of_writing(environment: TangramEnvironment) -> None:
    assert environment.execute({"command": "echo a; echo b >&2; echo c"})["output"] == "a\nb\nc\n"


@shows("mini-swe-agent", "Environment.execute (timeout)")
def test_a_command_that_takes_too_long_is_an_observation_with_what_it_printed(environment: TangramEnvironment) -> None:
    seen = environment.execute({"command": "echo early; sleep 60"}, timeout=6)
    assert (seen["output"], seen["returncode"], seen["extra"]["exception_type"]) == (
        "early\n\n[ran longer than 6 s]\n",
        -1,
        "TimeoutExpired",
    )


def test_a_command_that_no_shell_can_have_is_an_observation_too(environment: TangramEnvironment) -> None:
    for command in ("echo \0", "echo \ud800"):
        seen = environment.execute({"command": command})
        assert (seen["returncode"], seen["extra"]["exception_type"]) == (-1, "InvalidAction")


@shows("mini-swe-agent", "config: env, forward_env")
def test_variables_are_those_of_the_configuration_and_those_forwarded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "here")
    with TangramEnvironment(env={"A": "1"}, forward_env=["GIVEN", "NOT_SET"], timeout=60) as environment:
        assert environment.execute({"command": "echo $A $GIVEN ${NOT_SET-none}"})["output"] == "1 here none\n"


@shows("mini-swe-agent", "a failure of the stack, by the class", "works; it ends the agent with its name and no submission")
def test_an_environment_that_is_gone_ends_the_agent_without_a_submission(live: Live) -> None:
    with TangramEnvironment(trajectory="gone", timeout=60) as environment, Client("mini-swe-agent") as other:
        model = DeterministicModel(outputs=[make_output("I look", [{"command": "ls"}], cost=0.0)])
        agent = DefaultAgent(model, environment, system_template="-", instance_template="-")
        other.cancel(trajectory="gone")
        live.until(lambda: environment.id not in standing(live))
        with pytest.raises((ActionCancelled, ActionFailed)) as ended:  # the command was cancelled with the others, or came after
            agent.run("-")
        assert agent.messages[-1]["extra"]["exit_status"] == ended.type.__name__ and agent.messages[-1]["extra"]["submission"] == ""


@shows("mini-swe-agent", "config: image", "differs: where no node has containers an image is a label, and a warning says so")
def test_an_image_is_a_label_where_no_node_has_containers(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with TangramEnvironment(image="python:3.12", timeout=60) as environment:
        assert environment.execute({"command": "echo here"})["output"] == "here\n"
    assert "python:3.12 is a label only" in caplog.text
