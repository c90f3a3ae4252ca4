"""uni-agent's sandboxes over the stack.

    python -m examples.integrations.uni_agent_sandbox

Run it from the project's root beside a stack (`tangram up`), with uni-agent's source tree on PYTHONPATH.
"""

from __future__ import annotations

import asyncio

from uni_agent.sandbox import SandboxConfig, build_sandbox

import tangram.integrations.uni_agent  # noqa: F401  # registers the sandbox


async def main() -> None:
    """Use a shell, whose folder stays."""
    async with build_sandbox(SandboxConfig(provider="tangram", sandbox_kwargs={"job": "example"})) as sandbox:
        shell = await sandbox.open_shell()
        await shell.run("mkdir -p work && cd work && echo here > file")
        print(await shell.run("cat file && basename $PWD"))
        print(await sandbox.exec(["cat", "work/file"]))


if __name__ == "__main__":
    asyncio.run(main())
