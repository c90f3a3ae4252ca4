"""Containers with an allow-list reach what it names, and nothing else; afterwards nothing is left of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.errors import InvalidAction
from tangram.settings import Settings
from tests.workers_cpu.support import printed, run, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.cores import CoreMap
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.network import NOBODY, _key
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EngineUnavailable
from workers.start import _container_sandbox

from .conftest import NODE, needed
from .lan import GREETING, Lan, greeter, lacking, lan
from .support import sandbox_threads

ROOT = Path(__file__).parents[2]
HOLDS = f"{NODE}-net"
SERVE = f"while :; do echo {GREETING} | nc -l -p 9000; done"


@pytest.fixture(scope="module")
def machine(image: str) -> Iterator[Lan]:
    """Give a machine beside the host."""
    needed(lacking())
    with lan() as made:
        yield made


@contextmanager
def allowing(base: Path, options: ContainerOptions, *allow: str, node: str = HOLDS) -> Iterator[ContainerSandbox]:
    """Give a sandbox whose containers may reach `allow`."""
    box = ContainerSandbox(base, node=node, options=replace(options, allow=allow))
    try:
        yield box
    finally:
        box.close()


def opened(box: ContainerSandbox, name: str = "e1") -> ContainerEnvironment:
    """Open an environment."""
    return box.open(EnvironmentSpec(id=name))


def reaches(env: ContainerEnvironment, address: str, port: int) -> bool:
    """Say whether the greeting of a server comes through."""
    return run(env, f"nc -w 3 {address} {port} </dev/null").stdout.decode().strip() == GREETING


def greets(address: str, port: int) -> bool:
    """Say whether a server greets the host."""
    try:
        with socket.create_connection((address, port), 3) as connection:
            return connection.recv(10).decode().strip() == GREETING
    except OSError:
        return False


def address_of(env: ContainerEnvironment) -> str:
    """Return the address of a container."""
    return printed(env, "grep sandbox /etc/hosts").split()[0]


def rules(program: str = "iptables") -> list[str]:
    """Return the rules and chains that are ours in the host's packet filter."""
    listed = subprocess.run([program, "-w", "-S"], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "TANGRAM-" in line]


def networks(node: str = HOLDS) -> list[str]:
    """Return the ids of a node's networks."""
    argv = ["docker", "network", "ls", "-q", "--filter", f"label=tangram.node={node}"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


def left(node: str = HOLDS) -> list[str]:
    """Return what is there of a node's network and rules."""
    key = _key(node)
    return [*networks(node), *(rule for program in ("iptables", "ip6tables") for rule in rules(program) if key in rule)]


def test_without_an_allow_list_the_machine_and_the_host_can_be_reached_on_dockers_network(
    tmp_path: Path, options: ContainerOptions, machine: Lan
) -> None:
    # Given an environment on Docker's own network; then all that is refused below can be reached from there
    box = ContainerSandbox(tmp_path / "box", node=HOLDS, options=replace(options, network="bridge"))
    with greeter(machine.host) as port:
        env = opened(box)
        assert all(reaches(env, address, 8001) for address in (machine.one, machine.two, machine.link_local))
        assert reaches(env, machine.host, port)
    box.close()


def test_what_is_allowed_is_reached_and_neither_its_other_ports_nor_other_addresses(
    tmp_path: Path, options: ContainerOptions, machine: Lan
) -> None:
    # Given one port of one address is allowed
    with allowing(tmp_path / "box", options, f"{machine.one}:8000") as box:
        env = opened(box)
        # Then that is reached, and nothing else
        assert reaches(env, machine.one, 8000)
        assert not reaches(env, machine.one, 8001)
        assert not reaches(env, machine.two, 8000)
        # And a refusal comes at once
        assert run(env, f"nc -w 18 {machine.two} 8000 </dev/null").execution_s < 12


def test_the_host_is_reached_on_none_of_its_addresses(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given a server on all addresses of the host, and everything is allowed on its port, as a range
    with greeter("0.0.0.0") as port, allowing(tmp_path / "box", options, f"0.0.0.0/0:{port}", f"{machine.one}:8000") as box:
        env = opened(box)
        gateway = printed(env, "route -n | grep ^0.0.0.0").split()[1]
        argv = ["ip", "-4", "-o", "addr", "show"]
        listed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        found = {line.split()[3].split("/")[0] for line in listed.splitlines()}
        assert {machine.host, gateway, "127.0.0.1"} <= found
        # When the container tries each; then none is reached
        assert [address for address in found if reaches(env, address, port)] == []
        assert reaches(env, machine.one, 8000)


def test_an_address_of_the_host_is_reached_where_it_is_named(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given two servers on the host, one of which is allowed
    with (
        greeter(machine.host) as port,
        greeter(machine.host) as other,
        allowing(tmp_path / "box", options, f"{machine.host}:{port}") as box,
    ):
        env = opened(box)
        # Then that one is reached
        assert reaches(env, machine.host, port)
        assert not reaches(env, machine.host, other)


def test_a_range_lets_through_to_its_machines_but_not_to_the_host(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given a range in which the host has an address, and a server on the allowed port there
    allowed = f"{machine.host.rpartition('.')[0]}.0/24:8000"
    with greeter(machine.host, 8000), allowing(tmp_path / "box", options, allowed) as box:
        env = opened(box)
        # Then the machine is reached on that port, and the host is not
        assert reaches(env, machine.one, 8000)
        assert reaches(env, machine.two, 8000)
        assert not reaches(env, machine.two, 8001)
        assert not reaches(env, machine.host, 8000)


def test_a_link_local_address_is_reached_only_where_it_is_named(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given everything is allowed on two ports, and a link-local address on one
    with allowing(tmp_path / "box", options, "0.0.0.0/0:8000", "0.0.0.0/0:8001", f"{machine.link_local}:8001") as box:
        env = opened(box)
        # Then the port that was named is reached there, and the other is not
        assert reaches(env, machine.link_local, 8001)
        assert not reaches(env, machine.link_local, 8000)
        assert reaches(env, machine.one, 8000)


def test_containers_do_not_reach_each_other(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given two environments, in one of which a server waits on a port that is allowed everywhere
    with allowing(tmp_path / "box", options, "0.0.0.0/0:9000") as box:
        one, two = opened(box, "e1"), opened(box, "e2")
        run(one, f"({SERVE}) >/dev/null 2>&1 &")
        address = address_of(one)
        assert until(lambda: reaches(one, address, 9000))
        # Then the other does not reach it
        assert not reaches(two, address, 9000)


def test_containers_of_the_engines_other_networks_are_not_reached(
    tmp_path: Path, image: str, options: ContainerOptions, machine: Lan
) -> None:
    # Given a server in a container on Docker's own network, whose port is allowed everywhere
    argv = ["docker", "run", "-d", "--rm", image, "sh", "-c", SERVE]
    other = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    try:
        shown = ["docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", other]
        address = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.strip()
        assert until(lambda: greets(address, 9000))
        with allowing(tmp_path / "box", options, "0.0.0.0/0:9000") as box:
            # Then it is not reached
            assert not reaches(opened(box), address, 9000)
    finally:
        subprocess.run(["docker", "kill", other], check=True, capture_output=True)


def test_no_question_for_a_name_leaves_the_container(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given a name server at the address that the engine's resolver is told to ask, which hears what is asked
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"from the host", (NOBODY, 53))
    assert until(lambda: len(machine.packets) == 1)
    # When a container asks for a name, the engine's resolver and the name server itself
    with allowing(tmp_path / "box", options, "0.0.0.0/0:53") as box:
        env = opened(box)
        assert run(env, "nslookup files.example").exit_code != 0
        run(env, f"echo question | nc -u -w 1 {NOBODY} 53")
        # Then nothing has come there
        argv = ["docker", "inspect", "-f", "{{json .HostConfig.Dns}}", env.container.id]
        assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip() == f'["{NOBODY}"]'
    assert len(machine.packets) == 1


def test_a_container_has_no_address_of_ipv6(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    with allowing(tmp_path / "box", options, f"{machine.one}:8000") as box:
        assert printed(opened(box), "cat /proc/net/if_inet6 2>/dev/null || true") == ""


def worker_of(argv: Sequence[str], before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a worker in a process of its own."""
    command = [*before, sys.executable, "-m", "tests.containers.allowed_worker", *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said_by(process: subprocess.Popen[str]) -> str:
    """Return a worker's first line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_name_is_looked_up_once_and_known_to_containers(tmp_path: Path, image: str, options: ContainerOptions, machine: Lan) -> None:
    # Given a host that knows a name
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{machine.one} files.example\n")
    before = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    # When it is allowed
    process = worker_of([str(tmp_path / "box"), HOLDS, image, "files.example:8000", "nc -w 3 files.example 8000 </dev/null"], before)
    try:
        # Then containers reach it by that name
        assert said_by(process) == GREETING
    finally:
        process.kill()
        process.wait()
    with allowing(tmp_path / "box", options):
        assert left() == []


def test_after_the_close_nothing_is_left(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given a sandbox with an allow-list, in which a container runs
    with allowing(tmp_path / "box", options, f"{machine.one}:8000") as box:
        opened(box)
        assert len(networks()) == 1
        assert rules("iptables")
        assert rules("ip6tables")
    # When it is closed; then nothing is left
    assert left() == []
    assert sandbox_threads() == []


def test_two_sandboxes_at_once_have_each_their_own_list(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given two sandboxes
    with allowing(tmp_path / "a", options, f"{machine.one}:8000") as first:
        env = opened(first)
        with allowing(tmp_path / "b", options, f"{machine.two}:8001", node=f"{HOLDS}-b") as second:
            other = opened(second)
            # Then each reaches what its own list names
            assert reaches(env, machine.one, 8000)
            assert not reaches(env, machine.two, 8001)
            assert reaches(other, machine.two, 8001)
            assert not reaches(other, machine.one, 8000)
        # And when one is closed, the other's list holds
        assert left(f"{HOLDS}-b") == []
        assert reaches(env, machine.one, 8000)
        assert not reaches(env, machine.two, 8001)


def test_what_a_killed_worker_left_is_replaced(tmp_path: Path, image: str, options: ContainerOptions, machine: Lan) -> None:
    # Given a worker that was killed
    process = worker_of([str(tmp_path / "box"), HOLDS, image, f"{machine.one}:8000", "echo up"])
    assert said_by(process) == "up"
    process.kill()
    process.wait()
    assert len(networks()) == 1
    before = left()
    # When the next one starts with another list
    with allowing(tmp_path / "box", options, f"{machine.two}:8000") as box:
        # Then that list holds, on one network
        assert len(networks()) == 1
        assert len(left()) == len(before)
        assert not reaches(opened(box), machine.one, 8000)
        assert reaches(box.get("e1"), machine.two, 8000)


def test_rules_that_somebody_took_away_come_back_before_a_container_is_made(
    tmp_path: Path, options: ContainerOptions, machine: Lan
) -> None:
    # Given a sandbox whose jumps somebody removes
    with allowing(tmp_path / "box", options, f"{machine.one}:8000") as box:
        whole = left()
        for jump in (rule for rule in left() if " -i tg-" in rule and rule.startswith(("-A DOCKER-USER", "-A INPUT"))):
            subprocess.run(["iptables", "-w", *jump.replace("-A ", "-D ", 1).split()], capture_output=True)
        assert len(left()) == len(whole) - 2
        # When a container is made; then the rules are as they were
        env = opened(box)
        assert left() == whole
        assert not reaches(env, machine.two, 8000)


def test_rules_that_others_are_put_before_come_to_the_front_again(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given somebody lets everything from the machine's bridge through, before our rules
    with allowing(tmp_path / "box", options, f"{machine.one}:8000") as box:
        env = opened(box)
        rule = ["DOCKER-USER", "-d", machine.two, "-j", "ACCEPT"]
        subprocess.run(["iptables", "-w", "-I", *rule], check=True)
        try:
            # When the rules are looked at; then the other one does not count
            assert until(lambda: not reaches(env, machine.two, 8000), 15.0)
        finally:
            subprocess.run(["iptables", "-w", "-D", *rule], check=True)


def test_where_something_comes_before_dockers_rules_no_container_is_made(tmp_path: Path, options: ContainerOptions, machine: Lan) -> None:
    # Given a sandbox, and somebody who lets packets through before Docker's rules are asked
    with allowing(tmp_path / "box", options, f"{machine.one}:8000") as box:
        rule = ["FORWARD", "-d", machine.two, "-j", "ACCEPT"]
        subprocess.run(["iptables", "-w", "-I", *rule], check=True)
        try:
            # When a container is wanted, or another worker starts; then it is refused
            with pytest.raises(
                EngineUnavailable, match=f"^no allow-list: the rule '-A FORWARD -d {machine.two}/32 -j ACCEPT' .*comes before"
            ):
                opened(box)
            with pytest.raises(EngineUnavailable, match="comes before Docker's own$"):
                ContainerSandbox(tmp_path / "b", node=f"{HOLDS}-b", options=replace(options, allow=(f"{machine.one}:8000",)))
        finally:
            subprocess.run(["iptables", "-w", "-D", *rule], check=True)
        # And where that has gone, it is made
        assert reaches(opened(box), machine.one, 8000)
    assert left(f"{HOLDS}-b") == []


def test_without_iptables_the_worker_does_not_start(
    tmp_path: Path, options: ContainerOptions, machine: Lan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given no iptables
    monkeypatch.setenv("PATH", str(tmp_path))
    # When a sandbox with an allow-list starts; then it is refused
    with pytest.raises(EngineUnavailable, match="^no allow-list: there is no program iptables here$"):
        ContainerSandbox(tmp_path / "box", node=HOLDS, options=replace(options, allow=(f"{machine.one}:8000",)))
    # And nothing is left, and the folder can be had
    monkeypatch.undo()
    assert left() == []
    with allowing(tmp_path / "box", options):
        pass


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"), "does not work here (it needs root or NET_ADMIN)"),
        (("unshare", "--net"), "the packet filter has no rules of Docker here"),
    ],
    ids=["no NET_ADMIN", "another network namespace"],
)
def test_where_rules_would_not_hold_the_worker_does_not_start(
    tmp_path: Path, image: str, machine: Lan, before: tuple[str, ...], reason: str
) -> None:
    # Given a worker that cannot put rules where containers' packets meet them; when it starts
    process = worker_of([str(tmp_path / "box"), HOLDS, image, f"{machine.one}:8000", "echo up"], before)
    said, _ = process.communicate(timeout=30)
    # Then it is refused in one line, and nothing is left
    assert said.startswith("EngineUnavailable: no allow-list: "), said
    assert reason in said
    assert said.count("\n") == 1
    assert left() == []


@pytest.mark.parametrize(("name", "reason"), [("localhost:80", "is a loopback address"), ("no-such-name.invalid:80", "no IPv4 address")])
def test_a_name_that_cannot_be_allowed_is_refused_when_the_worker_starts(
    tmp_path: Path, image: str, machine: Lan, name: str, reason: str
) -> None:
    # Given such a name in the settings
    settings = Settings(sandbox="docker", image=image, container_allow=f"{machine.one}:8000, {name},")
    # When the worker starts; then it is refused, and nothing is left
    with pytest.raises(InvalidAction, match=f"^allow: '{name}'") as refused:
        _container_sandbox(tmp_path, CoreMap.of_this_process(), HOLDS, settings)
    assert reason in str(refused.value)
    assert left() == []
