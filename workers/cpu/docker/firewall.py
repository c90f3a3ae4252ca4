"""The host's packet filter, as far as one bridge of containers needs it; the only file that runs `iptables`.

Two chains of our own hold the rules of a bridge, and are jumped to by its interface:

| chain           | from          | for packets of containers                                          |
|-----------------|---------------|--------------------------------------------------------------------|
| `TANGRAM-F-<k>` | `DOCKER-USER` | to somewhere else; what is let through still meets Docker's rules  |
| `TANGRAM-I-<k>` | `INPUT`       | to the host itself; what is let through still meets the host's     |

Each packet is judged alone, by where it goes: there is no exception for connections that stand, so a rule that is gone ends
them, too. Addresses are those after the host's own translations, that is where a packet really goes. A chain is only ever put
or taken away as a whole, jumps included, in one transaction. IPv6 is closed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence

from workers.cpu.docker.allowed import LINK_LOCAL, AllowList, Target
from workers.cpu.errors import EngineUnavailable

IPV6 = "/proc/sys/net/ipv6"
WAIT_S, LIMIT_S = 10, 30
_OTHERS = re.compile(r"-A \S+ (?:-[sd] \S+ )*-i (\S+) ")
_REFUSE = ("-p tcp -j REJECT --reject-with tcp-reset", "-j REJECT --reject-with icmp-port-unreachable")


class Firewall:
    """The rules for what comes from the bridge `interface`. `key` tells its chains from those of other bridges.

    Raises:
        EngineUnavailable: from each method, where the packet filter cannot be had.

    """

    def __init__(self, interface: str, key: str) -> None:
        self._interface = interface
        self._forward, self._input = f"TANGRAM-F-{key}", f"TANGRAM-I-{key}"
        self._jumps = [("iptables", "DOCKER-USER", self._forward), ("iptables", "INPUT", self._input)]
        if os.path.isdir(IPV6):
            self._jumps += [("ip6tables", "FORWARD", self._forward), ("ip6tables", "INPUT", self._input)]

    def put(self, allowed: AllowList) -> None:
        """Put the rules into force, in place of those that are there."""
        self._check_way()
        rules = {"iptables": list(self._rules_of(allowed)), "ip6tables": [f"-A {each} -j DROP" for each in (self._forward, self._input)]}
        for program in dict.fromkeys(program for program, _, _ in self._jumps):
            jumps = [f"-I {parent} 1 -i {self._interface} -j {chain}" for by, parent, chain in self._jumps if by == program]
            self._commit(program, [*self._cleared(program), *rules[program], *jumps])

    def _check_way(self) -> None:
        """Refuse where what is forwarded does not come to DOCKER-USER before anything else can let it through."""
        for rule in _rules("iptables", "FORWARD"):
            if rule == "-A FORWARD -j DOCKER-USER":
                return
            other = _OTHERS.match(rule)
            if other is None or self._interface.startswith(other[1].rstrip("+")):
                raise EngineUnavailable(f"no allow-list: the rule {rule!r} of the packet filter comes before Docker's own")
        raise EngineUnavailable(
            "no allow-list: the packet filter has no rules of Docker here: the engine runs with --iptables=false, "
            "or the worker is not in the host's network"
        )

    def _rules_of(self, allowed: AllowList) -> Iterator[str]:
        single = [target for target in allowed.targets if target.is_single]
        ranges = [target for target in allowed.targets if not target.is_single]
        forward, host = f"-A {self._forward}", f"-A {self._input}"
        yield f"{forward} -o {self._interface} -j DROP"
        yield from (f"{forward} {_match(target)} -j RETURN" for target in single)
        yield from (f"{forward} -d {LINK_LOCAL} {refusal}" for refusal in _REFUSE)
        yield from (f"{forward} {_match(target)} -j RETURN" for target in ranges)
        yield from (f"{forward} {refusal}" for refusal in _REFUSE)
        yield from (f"{host} {_match(target)} -j RETURN" for target in single)
        yield from (f"{host} {refusal}" for refusal in _REFUSE)

    def holds(self) -> bool:
        """Say whether the rules are in force: nothing but jumps of other bridges comes before ours."""
        try:
            self._check_way()
        except EngineUnavailable:
            return False
        for program, parent, chain in self._jumps:
            for rule in _rules(program, parent):
                if rule.endswith(f" -j {chain}"):
                    break
                if " -j TANGRAM-" not in rule:
                    return False
            else:
                return False
        return True

    def remove(self) -> None:
        """Take the rules away; nothing where there are none."""
        for program in dict.fromkeys(program for program, _, _ in self._jumps):
            removed = [f"-X {chain}" for by, _, chain in self._jumps if by == program]
            self._commit(program, [*self._cleared(program), *removed])

    def _cleared(self, program: str) -> list[str]:
        """Return what empties our chains, which then exist, and takes away the jumps to them."""
        mine = [(parent, chain) for by, parent, chain in self._jumps if by == program]
        found = [rule for parent, chain in mine for rule in _rules(program, parent) if rule.endswith(f" -j {chain}")]
        return [*(f":{chain} - [0:0]" for _, chain in mine), *(rule.replace("-A ", "-D ", 1) for rule in found)]

    def _commit(self, program: str, lines: Sequence[str]) -> None:
        text = "\n".join(("*filter", *lines, "COMMIT", ""))
        _run([f"{program}-restore", "--wait", str(WAIT_S), "--noflush"], text)


def _match(target: Target) -> str:
    return f"-d {target.range} -p tcp --dport {target.port}"


def _rules(program: str, chain: str) -> list[str]:
    """Return the rules of a chain; none where there is no such chain."""
    listed = _run([program, "--wait", str(WAIT_S), "--list-rules"], "")
    return [line for line in listed.splitlines() if line.startswith(f"-A {chain} ")]


def _run(argv: Sequence[str], given: str) -> str:
    try:
        done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=LIMIT_S)
    except FileNotFoundError:
        raise EngineUnavailable(f"no allow-list: there is no program {argv[0]} here") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineUnavailable(f"no allow-list: {argv[0]} does not work here: {error}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise EngineUnavailable(f"no allow-list: {argv[0]} does not work here (it needs root or NET_ADMIN): {said}")
    return done.stdout
