"""What a session keeps from command to command, what a fence takes away, and how a session ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.workers_cpu.support import RUN, admit, followed, printed, processes_with, run, sleepers, until
from workers.cpu.abstract import Environment, ExecRequest
from workers.cpu.errors import ProcessesLeft
from workers.cpu.shell import session
from workers.cpu.shell.session import Session

from .test_output import exists


def test_folder_variables_functions_and_processes_are_kept(shell_env: Environment) -> None:
    pid = printed(
        shell_env, "mkdir -p sub; cd sub; x='a b'; export Y=2; f() { echo \"f $1\"; }; sleep 300 >/dev/null 2>&1 & echo $!"
    ).strip()
    assert printed(shell_env, f"basename $PWD; echo $x; sh -c 'echo $Y'; f 3; kill -0 {pid} && echo lives") == "sub\na b\n2\nf 3\nlives\n"


def test_sessions_of_one_environment_share_files_but_no_state(env: Environment) -> None:
    path = printed(env, "x=1; echo shared > file; cp file $TMPDIR/other; echo $TMPDIR/other", session="one").strip()
    assert printed(env, "echo [$x]; cat file $TMPDIR/other", session="two") == "[]\nshared\nshared\n"
    assert env.read_file("file") == env.read_file(path) == b"shared\n"


def test_a_session_that_is_closed_leaves_nothing_and_begins_afresh(env: Environment) -> None:
    for name in ("one", "two"):
        printed(env, f"sleep 312.6875{RUN} & true", session=name)
    printed(env, "export A=1; cd /tmp; echo text >$HOME/kept", session="one")
    assert len(sleepers(f"312.6875{RUN}", 2)) == 2
    env.close_session("one")
    assert len(processes_with(f"312.6875{RUN}")) == 1
    assert printed(env, "ls /run/tangram-states 2>/dev/null | wc -l", session="two").strip() in ("0", "1")
    assert printed(env, "echo -$A-; cat kept", session="one") == "--\ntext\n"
    # Closing one that does not exist is nothing
    env.close_session("never")


def test_a_session_that_is_to_be_idle_stays_while_a_program_runs_in_it(env: Environment) -> None:
    printed(env, f"export A=1; sleep 312.71875{RUN} & true", session="busy")
    printed(env, "export A=1", session="idle")
    for name in ("busy", "idle"):
        env.close_session(name, idle_only=True)
    assert [printed(env, "echo -$A-", session=name) for name in ("busy", "idle")] == ["-1-\n", "--\n"]


def test_an_environment_that_closes_while_a_session_does_ends_that_session(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    printed(env, f"sleep 312.734375{RUN} & true", session="one")
    begun, ending = threading.Event(), Session.close
    monkeypatch.setattr(Session, "close", lambda one: (begun.set(), ending(one)))
    closing = threading.Thread(target=env.close_session, args=("one",))
    closing.start()
    assert begun.wait(60)
    env.close()
    assert not processes_with(f"312.734375{RUN}")
    closing.join()


def test_a_session_that_did_not_end_is_ended_with_its_environment(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    printed(env, f"sleep 312.765625{RUN} & true", session="one")
    with monkeypatch.context() as patched:
        patched.setattr(session, "_has_ended", lambda backend: False)
        with pytest.raises(ProcessesLeft):
            env.close_session("one")
    env.close()
    assert not processes_with(f"312.765625{RUN}")


def test_a_shell_that_ended_is_followed_by_one_with_the_state_and_the_processes(bash_env: Environment) -> None:
    printed(bash_env, f"mkdir sub; cd sub; export Y='a  b'; f() {{ echo \"f $1\"; }}; sleep 312.8125{RUN} >/dev/null 2>&1 &")
    printed(bash_env, "shopt -s expand_aliases; export POSIXLY_CORRECT=1; alias f=false g='\\f 4' return=false builtin=false")
    sleepers(f"312.8125{RUN}")
    assert run(bash_env, "exit 3").exit_code == 3
    assert printed(bash_env, 'basename $PWD; echo "$Y"; \\f 3; g') == "sub\na  b\nf 3\nf 4\n"
    assert len(processes_with(f"312.8125{RUN}")) == 1


def test_what_a_command_unset_is_not_in_the_state(shell_env: Environment) -> None:
    # Given state that was longer once
    printed(shell_env, f"export A=1 Z={'z' * 300}; f() {{ echo kept; }}; mkdir one")
    printed(shell_env, "unset A Z; unset -f f")
    # When the shell ends; then the next one has none of what was unset
    assert run(shell_env, "exit 3").exit_code == 3
    assert printed(shell_env, "echo ${A-none} ${Z-none}; command -v f || ls") == "none none\none\n"


def test_a_shell_that_is_ended_as_it_saves_leaves_no_words_of_an_earlier_value_as_commands(shell_env: Environment) -> None:
    # Given a saved value that is longer than what the shell can write over it later
    printed(shell_env, f"export B='{' ; touch broken' * 2000} #'")
    printed(shell_env, f"unset B; export {'A' * 20_000}; ulimit -f 8")
    # When another shell starts; then it has run nothing of that value, and saves what it is told
    run(shell_env, "exit 3")
    assert printed(shell_env, "export C=1; ls") == ""
    run(shell_env, "exit 3")
    assert printed(shell_env, "echo $C; ls") == "1\n"


TRACES = "set -x; exec {0}>/dev/null; BASH_XTRACEFD={0}"


@pytest.mark.parametrize("left", ["trap 'echo touch broken' DEBUG", TRACES.format(6), TRACES.format(7), "ulimit -n 8"])
def test_whatever_prints_while_the_state_is_saved_or_takes_descriptors_the_state_is_whole(bash_env: Environment, left: str) -> None:
    run(bash_env, f"export A=1; {left}")
    # And a shell that traces goes on to
    assert ("set -x" in left) == ("x" in printed(bash_env, "echo $-"))
    run(bash_env, "exit 3")
    assert printed(bash_env, "echo $A; ls") == "1\n"


def test_a_folder_that_was_removed_is_replaced_by_home(env: Environment) -> None:
    printed(env, "mkdir sub; cd sub; rmdir ../sub")
    run(env, "exit 1")
    assert printed(env, "pwd") == printed(env, "cd; pwd")


def test_a_home_that_nobody_may_enter_keeps_no_shell_from_starting(env: Environment) -> None:
    printed(env, "chmod 000 .")
    assert printed(env, "echo alive", session="other") == "alive\n"
    assert admit(env, "echo alive", fence=True).wait().stdout == b"alive\n"
    printed(env, "chmod 755 ~")


def test_a_shell_killed_between_two_commands_is_replaced(env: Environment) -> None:
    printed(env, "(until [ -e go ]; do sleep 0.01; done; kill -9 $$; touch gone) >/dev/null 2>&1 &")
    env.write_file("go", b"")
    assert until(lambda: exists(env, "gone"))
    assert printed(env, "echo alive") == "alive\n"


def test_functions_named_as_what_the_protocol_uses_neither_run_nor_lose_the_state(shell_env: Environment) -> None:
    printed(shell_env, "test() { echo called >>log; return 0; }; export A=1")
    printed(shell_env, "export B=2")
    assert run(shell_env, "exit 3").exit_code == 3
    assert printed(shell_env, "echo $A $B; cat log 2>&1 | grep called; :") == "1 2\n"


def test_aliases_named_as_what_the_protocol_uses_change_commands_alone(shell_env: Environment) -> None:
    names = "builtin command eval exec exit export printf read test"
    printed(shell_env, f"shopt -s expand_aliases 2>/dev/null; mkdir sub; for n in {names}; do alias $n='echo an alias of'; done")
    assert run(shell_env, "exec here; basename $PWD", cwd="sub").stdout == b"an alias of here\nsub\n"
    # And a program of its own begins, too
    outcome = run(shell_env, 'echo "$A"; basename $PWD', interpreter=("sh", "-c"), cwd="~/sub", variables={"A": "1  $B"})
    assert (outcome.exit_code, outcome.stdout) == (0, b"1  $B\nsub\n")


def test_the_environment_is_bare(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a worker with secrets in its environment, which a session is started by
    monkeypatch.setenv("TANGRAM_BROKER_URL", "redis://:secret@host")
    names = {line.partition("=")[0] for line in printed(env, "env").splitlines()}
    meant = {name for name in names if name.startswith("TANGRAM_") or name.endswith("_NUM_THREADS")}
    assert names - meant <= {
        "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "TERM", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "MAKEFLAGS",
        "PYTEST_XDIST_AUTO_NUM_WORKERS",
    }  # fmt: skip
    assert {name for name in meant if name.startswith("TANGRAM_")} == {"TANGRAM_DOP"}
    # And no process above it shows them
    shown = printed(env, "cat /proc/$$/environ /proc/$PPID/environ 2>/dev/null | tr '\\0' '\\n'; :")
    assert "HOME=" in shown
    assert "secret" not in shown
    # And it has no descriptor but the three standard ones, and that of the listing itself, and can gain no privileges
    listed = printed(env, "python3 -c 'import os; print(sorted(int(d) for d in os.listdir(\"/proc/self/fd\")))'")
    assert listed == "[0, 1, 2, 3]\n"
    assert printed(env, "grep NoNewPrivs /proc/self/status; ulimit -c").split() == ["NoNewPrivs:", "1", "0"]
    home, temporary, here = printed(env, "echo $HOME; f=$(mktemp); dirname $f; pwd").splitlines()
    assert home == here
    for folder in (home, temporary):
        env.write_file(f"{folder}/mine", b"1")
        assert env.read_file(f"{folder}/mine") == b"1"


def test_a_program_gets_variables_whose_names_no_shell_knows(shell_env: Environment) -> None:
    variables = {"discovery.type": "single $node", "-i": "odd", "PLAIN": "too"}
    outcome = run(shell_env, "env", interpreter=("env",), variables=variables)
    assert {f"{name}={value}".encode() for name, value in variables.items()} <= set(outcome.stdout.splitlines()), outcome


def test_variables_of_a_request_end_with_its_command(shell_env: Environment) -> None:
    outcome = run(shell_env, "sh -c 'echo \"$COLOUR\"'", variables={"COLOUR": "dark 'blue'\n$(id)"})
    assert outcome.stdout == b"dark 'blue'\n$(id)\n"
    assert printed(shell_env, "echo [$COLOUR]") == "[]\n"


def test_the_program_gets_its_dop(shell_env: Environment) -> None:
    command = "sh -c 'echo $TANGRAM_DOP $OMP_NUM_THREADS $MAKEFLAGS'"
    assert admit(shell_env, command, cores=(0, 1, 2), variables={"OMP_NUM_THREADS": "7"}).wait().stdout == b"3 7 -j3\n"


def test_commands_of_one_session_run_one_after_the_other(env: Environment) -> None:
    executions = [admit(env, "test ! -e busy && touch busy && sleep 0.05 && rm busy") for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert [outcome.exit_code for outcome in threads.map(lambda execution: execution.wait(), executions)] == [0, 0, 0, 0]


SLOW_TO_SAVE = "i=0; while [ $i -lt 3000 ]; do export V$i=$i; i=$((i + 1)); done; export Y=2; cd sub"


def test_what_a_command_exported_is_saved_before_its_shell_is_ended(shell_env: Environment) -> None:
    # Given a command after whose report the shell takes a while to save what was exported
    printed(shell_env, "mkdir sub")
    printed(shell_env, SLOW_TO_SAVE)
    # When the time of the next one is over before the shell comes to it; then everything is there afterwards
    shell_env.start(ExecRequest(action_id="a1", command="sleep 30", timeout_s=0.001)).wait()
    assert printed(shell_env, "basename $PWD; echo $Y $V0 $V2999") == "sub\n2 0 2999\n"


def test_a_session_that_exports_all_it_sets_is_restored(shell_env: Environment) -> None:
    # Given a session that exports what is set, the driver's own variable too
    printed(shell_env, "set -a")
    printed(shell_env, "Y=2")
    run(shell_env, "kill -9 $$")
    assert printed(shell_env, "sh -c 'echo $Y'") == "2\n"


# -- fences -------------------------------------------------------------------------------------------------------------

HOSTILE = """export WORD=left PATH=$PWD/bin:$PATH BASH_ENV=$PWD/env; mkdir -p bin deep
printf '#!/bin/sh\necho 100' >bin/score; chmod +x bin/score; cp bin/score bin/ls; echo 'echo 100' >env
ls() { echo 100; }; score() { echo 100; }; alias pwd='echo 100'; cd deep"""


def fenced(environment: Environment, command: str) -> bytes:
    outcome = environment.start(ExecRequest(action_id="a", command=command, fence=True, timeout_s=60)).wait()
    assert (outcome.status, outcome.exit_code) == ("succeeded", 0), outcome
    return outcome.stdout


def test_a_fenced_command_starts_from_a_clean_shell(shell_env: Environment) -> None:
    printed(shell_env, HOSTILE)
    assert printed(shell_env, "score") == "100\n"
    assert fenced(shell_env, "echo ${WORD-none} ${BASH_ENV-none}; ls; command -v score || basename $PWD") == b"none none\ndeep\n"
    assert printed(shell_env, "echo ${WORD-none}; ls; sh -c 'echo ok'") == "none\nok\n"


def test_a_fence_ends_what_commands_of_all_sessions_have_left_and_spares_what_another_is_running(env: Environment) -> None:
    sleeping = f"sleep 312.4375{RUN}"
    printed(env, f"{sleeping} & setsid {sleeping} & (setsid {sleeping} &) ; true", session="one")
    printed(env, f"setsid {sleeping} & true", session="two")
    sleepers(f"312.4375{RUN}", 4)
    with followed(env, "touch begun; until test -f go; do sleep 0.01; done; echo done", session="three") as three:
        assert until(lambda: exists(env, "begun"))
        # When a session begins with one; then it ends what was left, in the others too
        fenced(env, "touch go")
        assert not processes_with(f"312.4375{RUN}")
        assert three.outcome().stdout == b"done\n"
