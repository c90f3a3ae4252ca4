"""NeMo Gym's sandbox API over the stack.

    python -m examples.integrations.nemo_gym_sandbox

Run it from the project's root beside a stack (`tangram up`). Once this package is installed, its provider is found by the name `tangram`.
Here it is registered by hand, so that the example runs from a source tree.
"""

from __future__ import annotations

from nemo_gym.sandbox import Sandbox, SandboxSpec
from nemo_gym.sandbox.providers.registry import register_provider

from tangram.integrations.nemo_gym import TangramProvider


def main() -> None:
    """Run a command on a file."""
    register_provider("tangram", TangramProvider, override=True)
    sandbox = Sandbox({"tangram": {"job": "example"}}).start(SandboxSpec(files={"numbers.txt": "3\n1\n2\n"}, ttl_s=600))
    try:
        print(sandbox.exec("sort -n numbers.txt", timeout_s=30))
    finally:
        sandbox.stop()


if __name__ == "__main__":
    main()
