"""docker-compose.yml as the real tool reads it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.needed import needed

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
PASSWORDS = {"REDIS_PASSWORD": "redis0password", "POSTGRES_PASSWORD": "postgres0password", "FLOWER_PASSWORD": "flower0password"}


@cache
def tool() -> tuple[str, ...]:
    """Return how compose is called here; nothing where it is not."""
    for words in (("docker", "compose"), ("docker-compose",)):
        try:
            if subprocess.run([*words, "version"], capture_output=True, timeout=200, check=False).returncode == 0:
                return words
        except OSError:
            continue
    return ()


def compose(*words: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run compose on the file with these variables and no others of its own."""
    needed("" if tool() else "neither docker compose nor docker-compose is here")
    with tempfile.NamedTemporaryFile("w", suffix=".env") as none:
        return subprocess.run(
            [*tool(), "--env-file", none.name, "--file", str(COMPOSE_FILE), "--profile", "gpu", "--profile", "monitoring", *words],
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )


def services(**variables: str) -> dict[str, dict[str, Any]]:
    """Return the services as compose understands them, by name."""
    done = compose("config", variables={**PASSWORDS, **variables})
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = yaml.safe_load(done.stdout)["services"]
    return found


def environment(service: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a service that have values."""
    return {name: str(value).replace("$$", "$") for name, value in service.get("environment", {}).items() if value is not None}
