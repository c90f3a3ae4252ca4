"""What an allow-list may say; nothing is started for it."""

from __future__ import annotations

import pytest

from tangram.errors import InvalidAction
from workers.cpu.docker.options import ContainerOptions


@pytest.mark.parametrize(
    ("allow", "reason"),
    [
        ("10.0.0.5", "is not an address and a port"),
        (":443", "is not an address and a port"),
        ("10.0.0.5:", "is not a number from 1 to 65535"),
        ("10.0.0.5:https", "is not a number from 1 to 65535"),
        ("10.0.0.5:0", "is not a number from 1 to 65535"),
        (f"10.0.0.5:{'9' * 5000}", "is not a number from 1 to 65535"),
        ("10.0.0.5:65536", "is not a number from 1 to 65535"),
        ("10.0.0.256:443", "10.0.0.256"),
        ("10.0.0.5/33:443", "10.0.0.5/33"),
        ("192.168.7.1/24:8000", "has host bits set"),
        ("[fd00::1]:443", "is not IPv4"),
        ("fd00::1:443", "is not IPv4"),
        ("http://files.example:80", "is not IPv4"),
        ("files example:80", "is neither an IPv4 address, nor a range, nor a name"),
        ("10.0.0.5:443 -j ACCEPT", "is not a number from 1 to 65535"),
        ("127.0.0.1:80", "is a loopback address"),
        ("224.0.0.1:80", "is a multicast address"),
        ("0.0.0.0:80", "is no address"),
        ("169.254.169.0/24:80", "one by one"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(allow: str, reason: str) -> None:
    # When such an entry is given; then one line says what is wrong with it
    with pytest.raises(InvalidAction, match="^allow: ") as refused:
        ContainerOptions(allow=("10.0.0.5:443", allow))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_allow_list_goes_with_no_other_network() -> None:
    with pytest.raises(InvalidAction, match="^allow: goes with no other network: 'bridge' is not held to it$"):
        ContainerOptions(allow=("10.0.0.5:443",), network="bridge")
