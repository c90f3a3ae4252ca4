"""The unchanged client of SWE-ReX against a whole stack, through the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.clients.rows import shows
from tests.gateway.conftest import Served

pytest.importorskip("swerex", reason="the extra `clients` is not installed")

from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

from tests.gateway.rex_support import Rex, do, rex, runtime_of

pytestmark = pytest.mark.real

__all__ = ["rex", "runtime_of"]

# -- shells ---------------------------------------------------------------------------------------------------------


@shows("swe-rex", "run_in_session", "works; standard input is empty; a timeout ends the command, an `exit` leaves the shell usable")
def test_a_session_keeps_its_state_and_has_both_streams_in_order(rex: Rex) -> None:
    rex.run("cd /tmp; export WORD=kept; f() { echo in f; }; x=1")
    assert rex.run("echo $WORD; pwd >&2; f; echo $x") == "kept\n/tmp\nin f\n1\n"
    assert rex.run("printf '\\033[31mred\\033[0m\\r\\n'") == "red\n"
    # Also where a command ends its shell
    rex.run("export STAYS=yes; cd")
    assert do(rex.runtime.run_in_session(BashAction(command="exit 4", check="silent"))).exit_code == 4
    assert rex.run("echo $STAYS") == "yes\n"


@shows("swe-rex", "run_in_session")
def test_check_says_what_an_exit_code_is_for(rex: Rex) -> None:
    with pytest.raises(NonZeroExitCodeError, match="it broke: Command '\\(exit 3\\)' failed with exit code 3"):
        rex.run("(exit 3)", error_msg="it broke")
    by_check = {check: do(rex.runtime.run_in_session(BashAction(command="(exit 3)", check=check))) for check in ("silent", "ignore")}
    assert (by_check["silent"].exit_code, by_check["ignore"].exit_code) == (3, None)


@pytest.mark.parametrize(
    "command",
    [
        "if",
        "touch ledger-syntax; fi",
        "echo begun >>ledger-syntax\nfor x in",
        "touch ledger-syntax\necho 'open",
        "touch ledger-syntax; } ; { echo b",
    ],
)
def test_wrong_syntax_runs_nothing(rex: Rex, command: str) -> None:
    with pytest.raises(BashIncorrectSyntaxError) as caught:
        rex.run(command, check="silent")
    assert "line" in caught.value.extra_info["bash_stderr"] and caught.value.extra_info["bash_stdout"] == ""
    assert rex.run("ls ledger-syntax 2>/dev/null", check="silent") == ""


NOTHING = ("", "  ", "# a comment", "\n")
WRONG = ("sh -c 'echo wrong >&2; exit 2'", "cat <<EOF; echo no >&2; false", "bash -c if", "kill -9 $$")


@pytest.mark.parametrize("command", [*NOTHING, *WRONG])
def test_a_command_that_does_nothing_or_fails_with_words_is_no_wrong_syntax(rex: Rex, command: str) -> None:
    done = do(rex.runtime.run_in_session(BashAction(command=command, check="silent")))
    assert (done.exit_code == 0 and not done.output.strip()) if command in NOTHING else done.exit_code not in (0, None)


@shows("swe-rex", "run_in_session")
def test_a_command_beyond_its_timeout_is_ended_and_the_session_goes_on(rex: Rex) -> None:
    with pytest.raises(CommandTimeoutError, match="timeout after 2.5 seconds") as caught:
        rex.run("export BEFORE=1; echo begun; sleep 600", timeout=2.5)
    assert caught.value.extra_info["output"] == "begun\n"
    # When the client interrupts, as SWE-agent does after a timeout, nothing is left to interrupt
    assert do(rex.runtime.run_in_session(BashInterruptAction())).exit_code == 0
    assert rex.run("echo on") == "on\n"


@shows("swe-rex", "run_in_session (interrupt)", "works also while the command runs; both calls have its output")
def test_an_interrupt_ends_the_running_command(rex: Rex) -> None:
    interrupt, command = rex.interrupted("echo so far; touch begun; sleep 600", timeout=60)
    assert (interrupt.exit_code, command.exit_code) == (0, 130)
    assert (interrupt.output, command.output) == ("so far", "so far\n")
    assert rex.run("echo on") == "on\n"


@shows("swe-rex", "create_session", "works; the first one opens the environment; a startup that is too slow is CommandTimeoutError")
@shows("swe-rex", "close_session")
def test_sessions_are_created_and_closed_by_name(rex: Rex) -> None:
    runtime, request = rex.runtime, CreateBashSessionRequest(session="second", startup_timeout=60)
    do(runtime.create_session(request))
    with pytest.raises(SessionExistsError):
        do(runtime.create_session(request))
    home = rex.run("pwd", session="second").strip()
    rex.run("export WORD=second; cd /", session="second")
    assert "second" not in rex.run("echo $WORD")
    do(runtime.close_session(CloseBashSessionRequest(session="second")))
    for call in (
        runtime.run_in_session(BashAction(command="true", session="second")),
        runtime.close_session(CloseBashSessionRequest(session="second")),
        runtime.run_in_session(BashInterruptAction(session="never")),
    ):
        with pytest.raises(SessionDoesNotExistError):
            do(call)
    # Then the journal, which learns an end after the client, has that, too
    closed = "SELECT DISTINCT status FROM actions WHERE kind = 'cpu.close_session'"
    rex.served.live.until(lambda: rex.served.live.rows(closed) == [("succeeded",)])
    do(runtime.create_session(request))
    assert rex.run("echo -$WORD-; pwd", session="second").split() == ["--", home]
    do(runtime.close_session(CloseBashSessionRequest(session="second")))


@shows("swe-rex", "create_session")
def test_a_session_reads_its_startup_files(rex: Rex) -> None:
    content = '[ -n "$PS1" ] || return\nexport FROM_RC=yes\nalias said="echo said" exec=false eval=false .=false\necho read\n'
    do(rex.runtime.write_file(WriteFileRequest(path="rc", content=content)))
    path = rex.run("echo $PWD/rc").strip()
    created = do(rex.runtime.create_session(CreateBashSessionRequest(session="rc", startup_source=[path, "/nowhere"], startup_timeout=60)))
    assert created.output.startswith("read\n") and "/nowhere" in created.output
    assert [rex.run(command, session="rc") for command in ("said $FROM_RC", "said 1\necho 2")] == ["said yes\n", "said 1\n2\n"]
    action = BashAction(command="said 3", session="rc", is_interactive_command=True, expect=["said 3"], timeout=60)
    assert do(rex.runtime.run_in_session(action)).expect_string == "said 3"
    do(rex.runtime.close_session(CloseBashSessionRequest(session="rc")))


@shows("swe-rex", "create_session")
def test_a_session_that_could_not_start_is_not_there(rex: Rex) -> None:
    do(rex.runtime.write_file(WriteFileRequest(path="slow", content="sleep 60\n")))
    path = rex.run("echo $PWD/slow").strip()
    with pytest.raises(CommandTimeoutError):
        do(rex.runtime.create_session(CreateBashSessionRequest(session="slow", startup_source=[path], startup_timeout=0.3)))
    # And neither is one with a variable that no program can be handed
    answer = rex.post("create_session", session="large", env={"A": "x" * 200_000})
    assert answer.status_code == 400 and "at most 131071 bytes" in answer.text
    for session in ("slow", "large"):
        with pytest.raises(SessionDoesNotExistError):
            rex.run("true", session=session)


# -- programs -------------------------------------------------------------------------------------------------------


@shows("swe-rex", "execute", "works; several run at once; a signal n is exit code 128 + n")
def test_execute_has_the_meanings_of_subprocess_run(rex: Rex) -> None:
    done = rex.execute("echo $A; echo oops >&2; exit 3", shell=True, env={"A": "it's 1"})
    assert (done.stdout, done.stderr, done.exit_code) == ("it's 1\n", "oops\n", 3)
    assert rex.execute(["printf", "%s|", "a b", "$HOME", "'"]).stdout == "a b|$HOME|'|"
    assert rex.execute(["env"], env={"ONLY": "this"}).stdout == "ONLY=this\n"
    assert rex.execute(["pwd"], cwd="/usr").stdout == "/usr\n"
    assert rex.execute("", shell=True).exit_code == 0
    assert rex.execute("echo o; echo e >&2", shell=True, merge_output_streams=True).stdout == "o\ne\n"
    assert rex.execute(f": {'x' * 300_000}; echo ran", shell=True).stdout == "ran\n"
    killed = rex.execute("echo x; kill -9 $$", shell=True)
    assert (killed.stdout, killed.stderr, killed.exit_code) == ("x\n", "", 137)
    # And its exceptions, with what SWE-ReX adds to them
    with pytest.raises(NonZeroExitCodeError, match="why: Command 'exit 3' failed with exit code 3"):
        rex.execute("exit 3", shell=True, check=True, error_msg="why")
    with pytest.raises(CommandTimeoutError, match="Timeout \\(0.3s\\) exceeded"):
        rex.execute(["sleep", "60"], timeout=0.3)
    assert rex.execute(["echo", "on"]).stdout == "on\n"


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (FileNotFoundError, {"command": ["no-such-program", "x"]}),
        (FileNotFoundError, {"command": "echo x"}),
        (FileNotFoundError, {"command": ["cd"], "env": {"PATH": "/nowhere"}}),
        (FileNotFoundError, {"command": ["ls"], "cwd": "/nowhere"}),
        (FileNotFoundError, {"command": ["/nowhere/program"]}),
        (PermissionError, {"command": ["/etc/passwd"]}),
        (PermissionError, {"command": ["/etc"]}),
        (OSError, {"command": ["ls"], "cwd": "/etc/passwd"}),
    ],
)
def test_a_program_that_cannot_be_run_is_pythons_error(rex: Rex, error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error):
        rex.execute(**options)


@shows("swe-rex", "execute")
def test_programs_run_beside_each_other_and_beside_shells(rex: Rex) -> None:
    async def meet() -> None:
        # Each waits for the file of the next, so none of them ends unless all run at once.
        waits = [f"touch at-{n}; until test -e at-{(n + 1) % 3}; do sleep 0.01; done" for n in range(3)]
        await asyncio.gather(
            rex.runtime.run_in_session(BashAction(command=waits[0], timeout=100)),
            *(rex.runtime.execute(Command(command=wait, shell=True, timeout=100, check=True)) for wait in waits[1:]),
        )

    asyncio.run(meet())


# -- calls ----------------------------------------------------------------------------------------------------------


@shows("swe-rex", "is_alive", "works: says whether the environment stands, without an action")
def test_is_alive_answers_beside_a_command_and_without_an_action(rex: Rex, runtime_of: Callable[[str, str], RemoteRuntime]) -> None:
    with rex.served.http("rex") as http:
        (environment,) = [one["id"] for one in http.get("/api/v1/environments").json() if one["name"] == rex.name]
    actions = f"SELECT count(*) FROM actions WHERE environment = '{environment}'"

    # Given a session that is busy
    async def beside_a_command() -> None:
        busy = asyncio.create_task(rex.runtime.run_in_session(BashAction(command="touch busy; sleep 60", check="silent")))
        while (await rex.runtime.execute(Command(command=["test", "-e", "busy"]))).exit_code != 0:
            assert not busy.done()
        before = rex.served.live.rows(actions)
        # When the environment is asked for; then it is there, without an action
        assert await rex.runtime.is_alive(timeout=60)
        assert rex.served.live.rows(actions) == before and not busy.done()
        await rex.runtime.run_in_session(BashInterruptAction())
        await busy

    asyncio.run(beside_a_command())
    nobody = do(runtime_of(rex.token, "never-opened").is_alive())
    assert not nobody and "never-opened" in nobody.message


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("run_in_session", {"action_type": "bash", "command": "echo ran >>LEDGER; sleep 0.5; wc -l <LEDGER"}),
        ("execute", {"command": "echo ran >>LEDGER; sleep 0.5; wc -l <LEDGER", "shell": True}),
    ],
)
def test_a_call_that_is_cut_and_sent_again_runs_once(rex: Rex, method: str, body: dict[str, Any]) -> None:
    # Given a call whose connection is cut once its command has begun
    ledger, key = f"ledger-{method}", f"key-{method}"
    body = {**body, "command": body["command"].replace("LEDGER", ledger)}
    with rex.served.begun(f"/envs/{rex.name}/{method}", body, {"X-API-Key": rex.token, "X-Request-ID": key}):
        rex.served.live.until(lambda: rex.execute(["test", "-e", ledger]).exit_code == 0)
    answers = [rex.post(method, key, **body).json() for _ in range(2)]
    assert {(answer.get("output") or answer["stdout"]).strip() for answer in answers} == {"1"}
    assert rex.execute(["cat", ledger]).stdout == "ran\n"


def test_sessions_are_created_and_closed_once_per_key(rex: Rex) -> None:
    assert [rex.post("create_session", "c1", session="keyed", startup_timeout=60).status_code for _ in range(2)] == [200, 200]
    assert rex.post("create_session", "c2", session="keyed").json()["swerexception"]["class_path"].endswith("SessionExistsError")
    assert [rex.post("close_session", "c3", session="keyed").status_code for _ in range(2)] == [200, 200]
    assert rex.post("close_session", "c4", session="keyed").json()["swerexception"]["class_path"].endswith("SessionDoesNotExistError")


@shows("swe-rex", "close", "works: closes the environment")
def test_an_environment_that_was_opened_otherwise_is_served_by_its_id(
    served: Served, http: httpx.Client, environment: str, runtime_of: Callable[[str, str], RemoteRuntime]
) -> None:
    runtime = runtime_of(str(http.headers["X-API-Key"]), environment.rpartition("/")[2])
    assert do(runtime.is_alive())
    do(runtime.create_session(CreateBashSessionRequest(startup_timeout=60)))
    do(runtime.run_in_session(BashAction(command="echo here > seen")))
    assert http.get(f"{environment}/files", params={"path": "seen"}).content == b"here\n"
    # When it is closed, it is gone for all, and closing it again is no error
    do(runtime.close())
    assert http.get(environment).status_code == 404
    do(runtime.close())
    assert not do(runtime.is_alive())
    for call in (runtime.create_session(CreateBashSessionRequest()), runtime.execute(Command(command=["true"]))):
        with pytest.raises(DeploymentNotStartedError):
            do(call)


def test_a_wrong_token_or_body_or_number_of_cpus_is_said_with_detail(rex: Rex, http: httpx.Client) -> None:
    opened = http.post("/api/v1/environments", json={"metadata": {"cpus": "many"}}).json()["id"]
    refused = http.post(f"/envs/{opened}/execute", json={"command": ["true"]})
    assert refused.status_code == 400 and "from 1 to 1024" in refused.json()["detail"]
    http.delete(f"/api/v1/environments/{opened}")
    unknown = httpx.post(f"{rex.url}/execute", json={"command": ["true"]}, headers={"X-API-Key": "wrong"})
    assert unknown.status_code == 401 and unknown.json()["detail"]
    wrong = rex.post("execute", command=7)
    assert wrong.status_code == 400 and "command" in wrong.json()["detail"]
