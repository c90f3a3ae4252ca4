"""Interactive programs through the unchanged client of SWE-ReX: interpreters and debuggers, which get a line and are read to a pattern."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.rows import shows
from tests.gateway.conftest import Served

pytest.importorskip("swerex", reason="the extra `clients` is not installed")

from swerex.exceptions import CommandTimeoutError, NoExitCodeError, NonZeroExitCodeError, SessionDoesNotExistError, SwerexException
from swerex.runtime.abstract import (
    AbstractRuntime,
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionRequest,
    CreateBashSessionRequest,
)
from swerex.runtime.local import LocalRuntime

from tests.gateway.rex_support import Rex, do, rex, runtime_of

pytestmark = pytest.mark.real

__all__ = ["rex", "runtime_of"]

PROMPT = "SHELLPS1PREFIX"
PYTHON = "python3 -i -q"
ASK = 'while printf \'> \' && read line && test "$line" != quit; do echo "you said $line"; done; echo bye'


@pytest.fixture
def shell(rex: Rex) -> Iterator[Rex]:
    """Give a runtime whose shell `default` is free at the end, whatever the test left there."""
    yield rex
    do(rex.runtime.run_in_session(BashInterruptAction(timeout=1.0)))


def line(rex: Rex, command: str, *expect: str, **options: Any) -> BashObservation:
    """Give the interactive program a line, or start one."""
    action = BashAction(command=command, is_interactive_command=True, expect=list(expect), **{"timeout": 60, **options})
    return do(rex.runtime.run_in_session(action))


@shows("swe-rex", "run_in_session (interactive)", "works; a program that nobody ends does so after an hour")
def test_an_interpreter_is_led_line_by_line(shell: Rex) -> None:
    started = line(shell, PYTHON, ">>> ")
    assert (started.expect_string, started.exit_code, started.output) == (">>> ", 0, "")
    assert line(shell, "x = 6 * 7", ">>> ").output == ""
    answers = [line(shell, text, r">>> ") for text in ("print(x)", "'a' + 'ü'", "1 / 0")]
    assert [answer.output for answer in answers[:2]] == ["42", "'aü'"]
    assert "ZeroDivisionError" in answers[2].output and answers[2].exit_code == 0
    # When it is left, the shell is the one from before
    left = do(shell.runtime.run_in_session(BashAction(command="quit()", is_interactive_quit=True, timeout=60)))
    assert (left.expect_string, left.exit_code) == (PROMPT, 0)
    assert shell.run("echo in the shell") == "in the shell\n"


# The end of a program is in none of those with an interpreter: SWE-ReX's own server gives it one second, which is little on a busy machine.
DIALOGUES: dict[str, list[tuple[str, list[str]]]] = {
    "interpreter": [(PYTHON, [">>> "]), ("6 * 7", [">>> "]), ("1 / 0", [">>> "])],
    "questions": [(ASK, ["> "]), ("one", ["never", "> "]), ("two", [r"said \w+"]), ("", ["> "]), ("quit", [])],
    "no program": [("echo only this", ["never"]), ("exit_code() { return 3; }; exit_code", [])],
}


@pytest.mark.parametrize("name", DIALOGUES)
def test_answers_are_those_of_swerexs_own_server(shell: Rex, name: str) -> None:
    # Given the same dialogue with a runtime of SWE-ReX itself
    async def of(runtime: AbstractRuntime) -> list[tuple[str, int | None, str]]:
        session = f"same-{name}"
        await runtime.create_session(CreateBashSessionRequest(session=session, startup_timeout=60))
        answers = []
        for command, expect in DIALOGUES[name]:
            action = BashAction(command=command, expect=expect, session=session, timeout=60, is_interactive_command=True)
            answer = await runtime.run_in_session(action)
            assert isinstance(answer, BashObservation)
            answers.append((answer.output, answer.exit_code, answer.expect_string))
        await runtime.close_session(CloseBashSessionRequest(session=session))
        return answers

    assert do(of(shell.runtime)) == do(of(LocalRuntime()))


@shows("swe-rex", "run_in_session (expect)", "works; patterns are looked for in the last 64 KiB of the output")
def test_the_first_pattern_that_comes_is_named_and_the_rest_waits(shell: Rex) -> None:
    assert line(shell, ASK, "> ").expect_string == "> "
    seen = line(shell, "one", "never", r"said \w+", "> ")
    assert (seen.expect_string, seen.output) == (r"said \w+", "you")
    assert line(shell, "two", "two\r\n> ").output == "> you said"
    ended = line(shell, "quit", "> ")
    assert (ended.expect_string, ended.output) == (PROMPT, "bye")


def test_a_program_that_does_not_answer_in_time_is_still_there(shell: Rex) -> None:
    line(shell, ASK, "> ")
    with pytest.raises(CommandTimeoutError, match="timeout after 0.5 seconds while running command 'one'"):
        line(shell, "one", "never", timeout=0.5)
    # What it printed meanwhile comes with the next line
    assert line(shell, "two", "said two").output == "you said one\n> you"


def test_an_interrupt_of_an_interpreter_gives_its_output_and_its_prompt(shell: Rex) -> None:
    line(shell, PYTHON, ">>> ")
    line(shell, "import time; print('begun and more'); time.sleep(300)", "begun")
    stopped = do(shell.runtime.run_in_session(BashInterruptAction(timeout=60, expect=[">>> "])))
    assert stopped.expect_string == ">>> " and "and more" in stopped.output and "KeyboardInterrupt" in stopped.output
    assert line(shell, "1 + 1", ">>> ").output == "2"


def test_an_interrupt_ends_a_program_that_ignores_it(shell: Rex) -> None:
    line(shell, "trap '' INT; echo ready; while :; do sleep 0.1; done", "ready")
    ended = do(shell.runtime.run_in_session(BashInterruptAction(timeout=0.2, n_retry=2)))
    assert (ended.expect_string, ended.exit_code) == (PROMPT, 0)
    # And a usual command, too
    interrupt, command = shell.interrupted("trap '' INT; touch begun; while :; do sleep 0.1; done", timeout=0.2, n_retry=1)
    assert (interrupt.exit_code, command.exit_code) == (0, 130)
    assert shell.run("echo free") == "free\n"


def test_a_usual_command_is_refused_while_an_interactive_program_runs_and_so_is_a_pattern_that_is_none(shell: Rex) -> None:
    line(shell, ASK, "> ")
    with pytest.raises(SwerexException, match="runs the interactive program .*is_interactive_quit"):
        shell.run("echo lost")
    assert line(shell, "on", "said on").output == "you"
    # And so is a pattern that is none, before the program is given the line
    with pytest.raises(ValueError, match="expect: "):
        line(shell, "lost", "(")
    assert "lost" not in line(shell, "last", "said last").output


def test_a_usual_command_may_expect_something(shell: Rex) -> None:
    for _ in range(12):  # the command ends while its pattern is found, or is still to end
        seen = do(shell.runtime.run_in_session(BashAction(command="echo one; echo two; (exit 3)", expect=["two"], check="silent")))
        assert (seen.expect_string, seen.exit_code, seen.output.splitlines()[0]) == ("two", 3, "one")
    with pytest.raises(NonZeroExitCodeError, match="exit code 3"):
        do(shell.runtime.run_in_session(BashAction(command="(exit 3)", expect=["never"])))
    with pytest.raises(NoExitCodeError):
        do(shell.runtime.run_in_session(BashAction(command=ASK, expect=["> "])))


def test_a_line_that_is_sent_again_is_given_once(shell: Rex) -> None:
    line(shell, ASK, "> ")
    body = {"action_type": "bash", "command": "again", "is_interactive_command": True, "expect": ["> "], "timeout": 30}
    answers = [shell.post("run_in_session", "line-1", **body).json()["output"] for _ in range(2)]
    assert answers == ["you said again"] * 2
    assert line(shell, "on", "> ").output == "you said on"


def test_closing_a_session_ends_its_program(served: Served, rex: Rex) -> None:
    do(rex.runtime.create_session(CreateBashSessionRequest(session="other", startup_timeout=60)))
    line(rex, ASK, "> ", session="other")
    do(rex.runtime.close_session(CloseBashSessionRequest(session="other")))
    with pytest.raises(SessionDoesNotExistError):
        line(rex, "lost", session="other")
    served.live.until(lambda: served.live.rows("SELECT id FROM actions WHERE status = 'running' AND kind = 'cpu.exec'") == [])
