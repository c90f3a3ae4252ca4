"""What SWE-ReX's own client gets wrong, and what works here: pinned, so that a release that changes it is noticed.

Source: SWE-ReX #298 (`is_alive(timeout=…)` of a remote deployment).
"""

from __future__ import annotations

import pytest

from tests.gateway.conftest import Served

pytest.importorskip("swerex", reason="the extra `clients` is not installed")

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.remote import RemoteDeployment
from swerex.runtime.abstract import CreateBashSessionRequest

from tests.gateway.rex_support import do

pytestmark = pytest.mark.real


def test_is_alive_with_a_timeout_is_asked_of_the_runtime(served: Served) -> None:
    # Given a deployment as a user makes it: its class takes no timeout, although the class that it is one of does
    deployment = RemoteDeployment(host=f"{served.url}/envs/is-alive", auth_token=served.token("rex-alive"), timeout=60)
    do(deployment.start())
    do(deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=60)))
    assert isinstance(deployment, AbstractDeployment)
    with pytest.raises(TypeError, match="timeout"):
        do(deployment.is_alive(timeout=60.0))
    # When its runtime is asked instead, with or without a timeout, then that works
    assert do(deployment.runtime.is_alive(timeout=60.0)) and do(deployment.runtime.is_alive()) and do(deployment.is_alive())
    do(deployment.stop())
