"""mini-swe-agent fixes a bug of the bundled repository, with a scripted model.

    python -m examples.integrations.mini_swe_agent_fix            # with the environment class
    MSWEA_DOCKER_EXECUTABLE=tangram-docker python -m examples.integrations.mini_swe_agent_fix docker     # with its own Docker environment

Run it from the project's root beside a stack (`tangram up`). A real run names the same class in its configuration and has a real model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output

REPO = Path(__file__).resolve().parents[1] / "repo"
BREAK = "python3 tools/edit.py textkit/slug.py 'if len(candidate) > longest' 'if len(candidate) >= longest'"
STEPS = (
    "ls && cat README.md",
    "python3 runtests.py test_slug",
    "grep -n longest textkit/slug.py",
    "python3 tools/edit.py textkit/slug.py 'if len(candidate) >= longest' 'if len(candidate) > longest'",
    "python3 runtests.py",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && grep -n 'len(candidate)' textkit/slug.py",
)


def open_class() -> Any:
    """Open an environment by the class."""
    environment = get_environment({"environment_class": "tangram.integrations.mini_swe_agent.TangramEnvironment", "timeout": 120})
    environment.upload(REPO)
    return environment


def open_docker() -> Any:
    """Open one by mini-swe-agent's Docker environment, which runs the command that `MSWEA_DOCKER_EXECUTABLE` names."""
    environment = get_environment({"environment_class": "docker", "image": "python:3.12-slim", "cwd": "repo", "timeout": 120})
    subprocess.run([environment.config.executable, "cp", str(REPO), f"{environment.container_id}:repo"], check=True)
    return environment


def fix(environment: Any) -> DefaultAgent:
    """Break the repository, have the agent repair it, and return the agent."""
    broken = environment.execute({"command": BREAK})
    assert broken["returncode"] == 0, broken
    model = DeterministicModel(outputs=[make_output(f"I run: {step}", [{"command": step}], cost=0.0) for step in STEPS])
    agent = DefaultAgent(model, environment, system_template="You fix bugs.", instance_template="{{task}}")
    agent.run("A title that just fits loses its last word.")
    return agent


def main() -> None:
    """Run one of both ways and print what the agent saw."""
    environment = open_docker() if sys.argv[1:] == ["docker"] else open_class()
    try:
        for message in fix(environment).messages:
            print(f"--- {message['role']}\n{message['content']}")
    finally:
        environment.cleanup()


if __name__ == "__main__":
    main()
