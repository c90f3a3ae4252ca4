"""The chart gives documents that Kubernetes takes, for each example of values, and refuses values that are wrong in a line that helps."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.needed import needed

from .support import ROOT

pytestmark = pytest.mark.real

CHART, TOOLS = ROOT / "deploy" / "helm" / "arl-tangram", ROOT / ".venv-helm" / "bin"
EXAMPLES = sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))
AUTOSCALING = [f"cpuDefaults.autoscaling.{key}=1" for key in ("min", "max", "environmentsPerNode")]
OPERATORS = {"PodMonitor", "ScaledObject", "TriggerAuthentication"}
"""Kinds that Kubernetes itself does not have."""


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    needed("" if (TOOLS / "helm").exists() else "needs Helm: make .venv-helm/.installed")
    return subprocess.run([TOOLS / "helm", *words], capture_output=True, text=True, timeout=300, check=False)


@cache
def documents(*words: str) -> tuple[dict[str, Any], ...]:
    """Return what the chart makes of these arguments."""
    done = helm("template", "t", str(CHART), *words)
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def of_kind(kind: str, name: str, *words: str) -> dict[str, Any]:
    (found,) = (each for each in documents(*words) if (each["kind"], each["metadata"]["name"]) == (kind, f"t-{name}"))
    return found


def containers(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = document["spec"]["template"]["spec"]
    return {each["name"]: each for each in (*spec.get("initContainers", ()), *spec["containers"])}


@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda path: path.stem if path else "default")
def test_each_document_is_valid(values: Path | None, tmp_path: Path) -> None:
    # Given the values of an example; when the chart is looked at; then nothing is wrong with it
    words = ("--values", str(values)) if values else ()
    done = helm("lint", str(CHART), "--strict", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    # And Kubernetes takes each document, both the oldest version that the chart allows and the newest with a schema
    standard = [each for each in documents(*words) if each["kind"] not in OPERATORS]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(standard))
    for version in (["--kubernetes-version", "1.30"], []):
        command = [TOOLS / "kubernetes-validate", "--strict", *version, tmp_path / "all.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("passed") == len(standard), done.stdout


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["cpuDefaults.rights=all"], "'restricted', 'namespaces', 'privileged'"),
        (["cpu.Big.cores=1"], "at '/cpu': additional properties 'Big' not allowed"),
        (["cpuDefaults.cores=0"], "/cpuDefaults/cores"),
        (["hub.priorityClassName=High One"], "/hub/priorityClassName"),
        (["cpuDefaults.tmpGi=0"], "/cpuDefaults/tmpGi"),
        (["cpuDefaults.memory=8Gi"], "additional properties 'memory' not allowed"),
        (["scheduler.replicas=two"], "/scheduler/replicas"),
        (["settings.lease=5"], "at '/settings': additional properties 'lease' not allowed"),
        (["stores.enabled=false"], "existingSecret must name a Secret"),
        (["gpu.a.gpus=1", "gpu.a.image=x", "gpu.a.memory=8Gi", "gpu.a.replicas=1"], "gpu needs services"),
        (["cpuDefaults.kind=DaemonSet", *AUTOSCALING], "StatefulSet"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_values_are_refused(wrong: list[str], named: str) -> None:
    done = helm("template", "t", str(CHART), *(word for value in wrong for word in ("--set", value)))
    assert done.returncode != 0
    assert named in done.stderr, done.stderr


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_processes_reach_what_they_need_and_no_more(values: Path) -> None:
    secret = ("TANGRAM_BROKER_URL", "TANGRAM_RESULT_URL")
    for document in documents("--values", str(values)):
        for container in containers(document).values() if "template" in document.get("spec", {}) else ():
            names = [variable["name"] for variable in container.get("env", ())]
            assert len(names) == len(set(names)), container
            # Programs of environments may find what the worker knows: not the journal's address.
            if container["name"] == "worker":
                assert set(secret) <= set(names) and "TANGRAM_DATABASE_URL" not in names
            if container.get("command", [""])[:2] == ["tangram", "scheduler"]:
                assert {*secret, "TANGRAM_DATABASE_URL"} <= set(names)


def test_a_node_is_drained_before_it_goes_and_offers_what_its_pod_has() -> None:
    words = ("--set", "cpuDefaults.drainS=100,cpuDefaults.cores=3,cpuDefaults.memoryMb=2000,cpuDefaults.reservedMemoryMb=500")
    nodes = of_kind("StatefulSet", "cpu-default", *words)
    found = containers(nodes)
    # The worker is a sidecar, which ends after the others
    assert found["worker"]["restartPolicy"] == "Always"
    assert "--wait 100" in found["drain"]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert nodes["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 100
    offers = {each["name"]: each.get("value") for each in found["worker"]["env"]}
    assert (offers["TANGRAM_CORES"], offers["TANGRAM_MEMORY_MB"], offers["TANGRAM_ISOLATION"]) == ("3", "2000", "none")
    assert found["worker"]["resources"]["limits"] == {"cpu": 3, "memory": "2500Mi"}


def test_a_pod_that_begins_puts_its_node_back_and_drains_it_when_it_goes(tmp_path: Path) -> None:
    # Given the container that drains a node, and a tangram that does not know the node at first
    drain = containers(of_kind("StatefulSet", "cpu-default"))["drain"]
    begins, goes = (
        [each.replace("/tmp/", f"{tmp_path}/") for each in command]
        for command in (drain["command"], drain["lifecycle"]["preStop"]["exec"]["command"])
    )
    for name, does in {
        "tangram": 'echo "$*" >>"$LOG"; [ "$(wc -l <"$LOG")" -gt 2 ]',
        "sleep": '[ "$1" != 3600 ] || exec cat "$HELD"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    log, held = tmp_path / "log", tmp_path / "held"
    os.mkfifo(held)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TANGRAM_NODE_NAME": "t-0", "LOG": str(log), "HELD": str(held)}
    # When the pod begins; then the node is put back, as soon as there is one
    with subprocess.Popen(begins, env=env) as pod:
        try:
            with held.open("w"):
                assert log.read_text().splitlines() == ["drain t-0 --undo"] * 3
                # And when it goes, its node is drained, and not put back once more
                subprocess.run(goes, env=env, timeout=60, check=True)
                assert log.read_text().splitlines()[3:] == ["drain t-0 --wait 600"]
        finally:
            pod.terminate()
        assert pod.wait(60) == 0


def test_others_are_let_in_to_the_gateway_alone() -> None:
    block = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    words = ("--set-json", 'networkPolicy.gatewayFrom=[{"ipBlock":{"cidr":"10.0.0.0/8"}}]')
    for name, is_open in {"gateway": True, "web": False, "redis": False}.items():
        (rule,) = of_kind("NetworkPolicy", name, *words)["spec"]["ingress"]
        assert (block in rule["from"]) is is_open


def test_pods_go_where_values_say() -> None:
    gpu, hub = str(ROOT / "deploy" / "helm" / "examples" / "gpu.yaml"), {"nodeSelector": {"pool": "hub"}, "priorityClassName": "training"}
    for kind, name in (("Deployment", "scheduler"), ("Deployment", "gateway"), ("StatefulSet", "redis"), ("StatefulSet", "postgres")):
        assert of_kind(kind, name, "--values", gpu)["spec"]["template"]["spec"].items() >= hub.items()
    pod = of_kind("StatefulSet", "gpu-a100", "--values", gpu)["spec"]["template"]["spec"]
    assert pod.items() >= {"nodeSelector": {"accelerator": "a100"}, "runtimeClassName": "nvidia", "priorityClassName": "training"}.items()
    assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]
    environments = of_kind("DaemonSet", "cpu-default", "--values", gpu)["spec"]["template"]["spec"]
    assert environments["nodeSelector"] == {"engine": "docker"} and "priorityClassName" not in environments


def test_programs_of_environments_reach_what_is_named_and_no_more() -> None:
    words = ("--set", "networkPolicy.limitNodes=true", "--set-json", 'networkPolicy.nodesTo=[{"ports":[{"port":3128}]}]')
    policy = of_kind("NetworkPolicy", "nodes", *words)["spec"]
    pod = of_kind("StatefulSet", "cpu-default", *words)["spec"]["template"]["metadata"]["labels"]
    assert policy["policyTypes"] == ["Egress"] and policy["podSelector"]["matchLabels"].items() <= pod.items()
    assert [[each["port"] for each in rule["ports"]] for rule in policy["egress"]] == [[53, 53], [5432], [6379], [3128]]
    assert all(rule["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "t" for rule in policy["egress"][1:3])


def test_the_restricted_example_keeps_to_the_pod_security_standard_of_that_name() -> None:
    restricted = str(ROOT / "deploy" / "helm" / "examples" / "restricted.yaml")
    for document in documents("--values", restricted):
        if "template" not in document.get("spec", {}):
            continue
        pod = document["spec"]["template"]["spec"]
        assert not {"hostPID", "hostNetwork", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod.get("volumes", ()))
        for container in containers(document).values():
            security = pod["securityContext"] | container["securityContext"]
            assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not security["allowPrivilegeEscalation"] and security["capabilities"] == {"drop": ["ALL"]}


def test_a_setting_of_a_group_of_nodes_is_over_that_of_all() -> None:
    words = ("--set", "settings.TANGRAM_BEAT_S=2,settings.TANGRAM_USAGE_S=3,cpuDefaults.settings.TANGRAM_BEAT_S=5")
    env = {each["name"]: each.get("value") for each in containers(of_kind("StatefulSet", "cpu-default", *words))["worker"]["env"]}
    assert (env["TANGRAM_BEAT_S"], env["TANGRAM_USAGE_S"]) == ("5", "3")


def test_large_numbers_of_a_file_are_written_as_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(
        "settings: {TANGRAM_OUTPUT_LIMIT_BYTES: 2097152, TANGRAM_BEAT_S: 0.5}\n"
        "cpuDefaults: {memoryMb: 1536000, drainS: 1000000}\nstores: {redis: {memoryMb: 1000000}}\n"
    )
    words = ("--values", f"{tmp_path}/values.yaml")
    found = containers(of_kind("StatefulSet", "cpu-default", *words))
    env = {each["name"]: each.get("value") for each in found["worker"]["env"]}
    assert (env["TANGRAM_OUTPUT_LIMIT_BYTES"], env["TANGRAM_MEMORY_MB"], env["TANGRAM_BEAT_S"]) == ("2097152", "1536000", "0.5")
    assert "--wait 1000000" in found["drain"]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "maxmemory 1000000mb" in containers(of_kind("StatefulSet", "redis", *words))["redis"]["command"][-1]
