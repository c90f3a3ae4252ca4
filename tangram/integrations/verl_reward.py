"""verl: a reward function that runs a check on a stack, for `reward.custom_reward_function`.

    path: pkg://tangram.integrations.verl_reward
    name: compute_score

The reward is 1 where the check exits with 0, else 0. A failure of the stack is no reward: what can be repeated is, then `ScoreFailed` is
raised, and the training step stops. So it does where the image lacks the program that the check begins with, such as `pytest`.

verl's reward managers `naive`, `dapo` and `gdpo` let it pass. The manager `rate_limited` makes 0 of every exception: do not use it with
this function.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import secrets
from collections.abc import Mapping
from typing import Any

from tangram.calls import Place
from tangram.errors import ActionCancelled, ActionFailed, ActionRefused, TangramError
from tangram.integrations.code_blocks import solution_of
from tangram.integrations.sandbox import Sandbox, borrow_client, return_client
from tangram.results import ExecResult

WORD = ".check-word"
"""The file with the random word that a check is to print last."""

KEPT = "tangram"
"""The extra field of a rollout that names an environment which `SandboxTool` has kept for scoring."""

ATTEMPTS = 3
_NOT_FOUND = 127
_FIRST_PROGRAM = re.compile(r"\s*(?:cd\s+[^\s;&|]+\s*(?:&&|;)\s*)?(?:[A-Za-z_]\w*=[^\s'\"`$\\]*\s+)*([\w./+-]+)(?=[\s;&|<>]|$)", re.ASCII)
"""The program that a command line begins with, behind a change of the folder and assignments."""

_log = logging.getLogger(__name__)


class ScoreFailed(TangramError):
    """Raised when the stack has failed in scoring, so that there is no score."""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    job: str = "verl",
    image: str | None = None,
    timeout_s: float = 300.0,
    solution_path: str = "solution.py",
    pattern: str | None = None,
    last_word: bool = False,
    **_: Any,
) -> dict[str, Any]:
    """Run the command `ground_truth` and return `score` 1.0 where it exits with 0, else 0.0, with its `exit_code`.

    That is -1 where the check was out of time, of memory or of disk.

    In the environment that a rollout has kept for scoring, it runs after everything that the rollout left running was ended, and the
    environment is closed. Else it runs in a fresh one beside the solution: the code of `solution_str`, as `code_blocks.solution_of` finds
    it, in the file `solution_path`, with the files of `extra_info["files"]` (texts by path). The arguments from `job` on are
    `reward_kwargs`.

    A solution can end the process of its check with 0 before this has checked anything. With `last_word`, the check reads and removes the
    file `.check-word` before it loads the solution, and prints the word in it last: without that it has not succeeded. Raises `ScoreFailed`
    when the stack has failed: at once for an environment that was kept, as it cannot be had again; else after three attempts. Also when the
    check exits with 127 where its first program cannot be found.
    """
    info = dict(extra_info or {})
    client, word = borrow_client(job), secrets.token_hex(8) if last_word else ""
    try:
        if kept := info.get(KEPT):
            done = await _check_kept(Sandbox(client, Place(**kept)), ground_truth, timeout_s, word)
        else:
            files = {**info.get("files", {}), solution_path: solution_of(solution_str, solution_path, pattern)}
            files |= {WORD: word} if word else {}
            done = await _check_fresh(client, ground_truth, files, image, timeout_s)
    except TangramError as error:
        if error.fault == "program":  # it filled its memory or its disk, or the place of the word
            return {"score": 0.0, "exit_code": -1}
        raise ScoreFailed(f"there is no score of a solution of {data_source}: {error}") from error
    finally:
        await return_client(client)
    # Its end is there where output is truncated.
    succeeded = done.exit_code == 0 and (not word or done.stdout.split()[-1:] == [word])
    return {"score": float(succeeded), "exit_code": -1 if done.exit_code is None or done.status != "succeeded" else done.exit_code}


async def _check_kept(sandbox: Sandbox, command: str, timeout_s: float, word: str) -> ExecResult:
    try:
        if word:  # nothing of the rollout may be there to read it
            await sandbox.exec(":", fence=True)
            try:
                await sandbox.write_file(WORD, word)
            except ActionRefused as error:
                raise ActionFailed(str(error), "exit") from error
        return await _checked(sandbox, command, await sandbox.exec(command, timeout_s=timeout_s, fence=True))
    finally:
        with contextlib.suppress(TangramError):
            await sandbox.close()


async def _check_fresh(client: Any, command: str, files: Mapping[str, str], image: str | None, timeout_s: float) -> ExecResult:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            sandbox = await Sandbox.open(client, trajectory=f"score-{secrets.token_hex(8)}", image=image)
            try:
                for path, text in files.items():
                    await sandbox.write_file(path, text.encode(errors="replace"))  # a model may write what has no UTF-8 form
                return await _checked(sandbox, command, await sandbox.exec(command, timeout_s=timeout_s))
            finally:
                with contextlib.suppress(TangramError):
                    await sandbox.close()
        except TangramError as error:
            passing = error.fault == "infrastructure" or isinstance(error, ActionCancelled)
            if attempt == ATTEMPTS or not passing:
                raise
            _log.warning("attempt %d of %d at a score failed: %s", attempt, ATTEMPTS, error)
            await asyncio.sleep(random.uniform(0.0, 2.0**attempt))
    raise AssertionError("the last attempt returns or raises")


async def _checked(sandbox: Sandbox, command: str, done: ExecResult) -> ExecResult:
    """Return how a check ended. Raises `ScoreFailed` where it could not begin: then it says nothing of the solution."""
    if done.exit_code == _NOT_FOUND and (program := _FIRST_PROGRAM.match(command)) is not None:
        found = await sandbox.exec(f"command -v -- {program[1]}")
        if found.exit_code == 1:  # else programs have brought it to nothing
            raise ScoreFailed(f"the image has no {program[1]}: {done.stderr.strip()[-200:]}")
    return done
