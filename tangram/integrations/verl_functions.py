"""verl: a function tool without state, for `function_tool_path`; each call runs in a fresh environment.

verl shows the text of an exception to the model. So use it with the agent loop `tangram_tool_agent` (`tangram.integrations.verl`), which
starts a rollout anew in which the stack has failed.
"""

from __future__ import annotations

import secrets

from verl.tools.function_tool import function_tool

from tangram.errors import InvalidAction, TangramError
from tangram.integrations.sandbox import Sandbox, borrow_client
from tangram.integrations.verl import note_failure

JOB = "verl"
TIMEOUT_S = 60.0


@function_tool("run_python")  # type: ignore[untyped-decorator]  # verl has no types
async def run_python(code: str) -> str:
    """Run a Python program in a fresh sandbox and return what it prints.

    Args:
        code: The program.

    """
    try:
        sandbox = await Sandbox.open(borrow_client(JOB), trajectory=f"verl-{secrets.token_hex(8)}")
        try:
            await sandbox.write_file("program.py", code)
            done = await sandbox.exec("python3 program.py", timeout_s=TIMEOUT_S, merged=True)
        finally:
            await sandbox.close()
    except InvalidAction:
        raise  # the model's words, which verl answers with the text of this error
    except TangramError as error:
        note_failure(error)
        raise
    # Why it was ended, and that output is truncated, is for the model, too.
    return done.stdout + (f"\n[{done.remark}]" if done.remark else "")
