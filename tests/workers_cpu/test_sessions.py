"""What a session keeps from command to command, and what it gets from the worker."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.freezing import held
from workers.cpu.abstract import ExecRequest
from workers.cpu.errors import ProcessesLeft
from workers.cpu.process import tree
from workers.cpu.process.backend import ProcessBackend
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell import session
from workers.cpu.shell.backend import Exited
from workers.cpu.shell.session import Session

from .support import RUN, admit, open_one, printed, processes_with, run, sleepers, until


def test_folder_variables_and_functions_are_kept(shell_env: ProcessEnvironment) -> None:
    # Given commands that change the state of the session
    printed(shell_env, "mkdir -p sub; cd sub; x='a b'; export Y=2; f() { echo \"f $1\"; }")
    # When a later one looks; then all is there
    assert printed(shell_env, "basename $PWD; echo $x; sh -c 'echo $Y'; f 3") == "sub\na b\n2\nf 3\n"


def test_background_processes_are_kept(shell_env: ProcessEnvironment) -> None:
    # Given a background process of a command
    pid = printed(shell_env, "sleep 300 >/dev/null 2>&1 & echo $!").strip()
    # When a later command asks for it; then it lives
    assert printed(shell_env, f"kill -0 {pid} && echo lives") == "lives\n"


def test_sessions_of_one_environment_share_files_but_no_state(env: ProcessEnvironment) -> None:
    # Given a variable and a file made in one session
    printed(env, "x=1; echo shared > file", session="one")
    # When another session looks; then it sees the file alone
    assert printed(env, "echo [$x]; cat file", session="two") == "[]\nshared\n"


def test_a_session_that_is_closed_leaves_nothing_and_begins_afresh(env: ProcessEnvironment) -> None:
    # Given two sessions, each with a program that runs on, and one of them with state
    for name in ("one", "two"):
        printed(env, f"sleep 312.6875{RUN} & true", session=name)
    printed(env, "export A=1; cd /tmp; echo text >$HOME/kept", session="one")
    assert len(sleepers(f"312.6875{RUN}", 2)) == 2
    # When that one is closed, then the program of the other runs on, and the state is gone, but not the files
    env.close_session("one")
    assert len(processes_with(f"312.6875{RUN}")) == 1
    assert printed(env, "echo -$A-; cat kept", session="one") == "--\ntext\n"
    # Closing one that does not exist is nothing
    env.close_session("never")


def test_a_session_that_is_to_be_idle_stays_while_a_program_runs_in_it(env: ProcessEnvironment) -> None:
    printed(env, f"export A=1; sleep 312.71875{RUN} & true", session="busy")
    printed(env, "export A=1", session="idle")
    for name in ("busy", "idle"):
        env.close_session(name, idle_only=True)
    assert [printed(env, "echo -$A-", session=name) for name in ("busy", "idle")] == ["-1-\n", "--\n"]


def test_an_environment_that_closes_while_a_session_does_ends_that_session(
    sandbox: ProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a session with a program that runs on, whose end has begun
    env = open_one(sandbox)
    printed(env, f"sleep 312.734375{RUN} & true", session="one")
    begun, ending = threading.Event(), Session.close

    def close(one: Session) -> None:
        begun.set()
        ending(one)

    monkeypatch.setattr(Session, "close", close)
    closing = threading.Thread(target=env.close_session, args=("one",))
    closing.start()
    assert begun.wait(30)
    # When the environment closes
    env.close()
    # Then nothing is left once that is done
    assert not processes_with(f"312.734375{RUN}")
    assert not list((tmp_path / "box" / "environments").iterdir())
    closing.join()


def test_a_session_that_did_not_end_is_ended_with_its_environment(sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a session whose processes do not end in time
    env = open_one(sandbox)
    printed(env, f"sleep 312.765625{RUN} & true", session="one")
    with monkeypatch.context() as patched:
        patched.setattr(session, "_has_ended", lambda backend: False)
        with pytest.raises(ProcessesLeft):
            env.close_session("one")
    # When the environment closes, then it waits for them
    env.close()
    assert not processes_with(f"312.765625{RUN}")


def test_environments_share_neither_files_nor_state(sandbox: ProcessSandbox) -> None:
    # Given two environments, and a file in the first
    first, second = open_one(sandbox, "e1"), open_one(sandbox, "e2")
    printed(first, "touch file $TMPDIR/temporary")
    # When the second lists its folders; then they are empty
    assert printed(second, "ls; ls $TMPDIR") == ""


def test_a_shell_that_ended_is_followed_by_one_in_the_same_folder_with_exports_and_functions(env: ProcessEnvironment) -> None:
    # Given a session with state, whose shell then ends
    printed(env, "mkdir sub; cd sub; export Y='a  b'; f() { echo \"f $1\"; }")
    assert run(env, "exit 3").exit_code == 3
    # When the next command runs; then the state is back
    assert printed(env, 'basename $PWD; echo "$Y"; f 3') == "sub\na  b\nf 3\n"


def test_a_folder_that_was_removed_is_replaced_by_home(env: ProcessEnvironment) -> None:
    # Given a session in a folder that is removed, and whose shell ends
    printed(env, "mkdir sub; cd sub; rmdir ../sub")
    run(env, "exit 1")
    # When the next command runs; then it is at home
    assert printed(env, "pwd") == printed(env, "cd; pwd")


def test_a_shell_killed_between_two_commands_is_replaced(env: ProcessEnvironment) -> None:
    # Given a shell that somebody kills while it waits
    pid = int(printed(env, "echo $$"))
    os.kill(pid, 9)
    assert until(lambda: not Path(f"/proc/{pid}").exists())
    # When a command runs; then a fresh shell carries it out
    assert printed(env, "echo alive") == "alive\n"


def test_functions_named_as_what_the_protocol_uses_neither_run_nor_lose_the_state(shell_env: ProcessEnvironment) -> None:
    # Given a session with a function of a name that the shell's own loop could need
    printed(shell_env, "test() { echo called >>log; return 0; }; export A=1")
    printed(shell_env, "export B=2")
    # When its shell ends
    assert run(shell_env, "exit 3").exit_code == 3
    # Then the state is back, and nobody has called it
    assert printed(shell_env, "echo $A $B; cat log 2>&1 | grep called; :") == "1 2\n"


def test_a_command_that_hands_in_its_run_again_is_killed_as_soon_as_any_other(
    env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that would wait for ten minutes for a shell to save its state
    monkeypatch.setattr("workers.cpu.shell.session.SAVE_LIMIT_S", 600.0)
    # When a command writes its own run where the shell reads the next one, and times out
    outcome = admit(env, 'd=$(readlink /proc/$$/fd/1); echo "$__tangram_run" >"${d%/*}/go" & sleep 60', timeout_s=0.5).wait()
    # Then it is not waited for, which pytest would end
    assert outcome.status == "timed_out"


def test_the_late_news_of_a_shells_end_is_not_taken_for_that_of_the_next(env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a session with state, whose shell a timeout ends, and a supervisor that says so only when the next one starts
    printed(env, "export KEPT=1")
    ended = Exited(int(printed(env, "echo $$")), 143, 0.0)
    assert admit(env, "sleep 20", timeout_s=0.1).wait().status == "timed_out"
    events = ProcessBackend.events
    monkeypatch.setattr(ProcessBackend, "events", lambda backend: itertools.chain([ended], events(backend)))
    # When a command comes; then it runs, and the state is there
    assert printed(env, "echo $KEPT") == "1\n"


def test_a_killed_supervisor_leaves_nothing_and_is_replaced(env: ProcessEnvironment) -> None:
    # Given a background process outside every process group of the session
    printed(env, f"setsid sleep 312.125{RUN} >/dev/null 2>&1 &")
    # When a command kills the supervisor
    outcome = run(env, "kill -9 $PPID; sleep 5")
    # Then the command has failed, nothing is left, and the next one runs
    assert outcome.status == "failed"
    assert "supervisor" in outcome.reason
    assert not processes_with(f"312.125{RUN}")
    assert printed(env, "echo alive") == "alive\n"


def test_what_a_killed_supervisor_left_goes_with_the_environment(env: ProcessEnvironment) -> None:
    # Given a background process of a session whose supervisor was killed while no command ran
    supervisor = int(printed(env, f"setsid sleep 312.15625{RUN} >/dev/null 2>&1 & echo $PPID"))
    assert until(lambda: bool(processes_with(f"312.15625{RUN}")))
    os.kill(supervisor, signal.SIGKILL)
    assert until(lambda: tree.read_process(supervisor) is None)
    # When the environment is closed; then the process has ended
    env.close()
    assert not processes_with(f"312.15625{RUN}")


def test_the_environment_is_bare(env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a worker with secrets in its environment, which a session is started by
    monkeypatch.setenv("TANGRAM_BROKER_URL", "redis://:secret@host")
    # When a command lists its variables
    names = {line.partition("=")[0] for line in printed(env, "env").splitlines()}
    # Then there are only those that were meant for it
    meant = {name for name in names if name.startswith("TANGRAM_") or name.endswith("_NUM_THREADS")}
    assert names - meant <= {
        "PATH", "HOME", "TMPDIR", "LANG", "TERM", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "MAKEFLAGS", "PYTEST_XDIST_AUTO_NUM_WORKERS",
    }  # fmt: skip
    assert {name for name in meant if name.startswith("TANGRAM_")} == {"TANGRAM_DOP"}


def test_no_process_of_a_session_shows_the_workers_environment(env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a worker with secrets
    monkeypatch.setenv("TANGRAM_BROKER_URL", "redis://:secret@host")
    # When a command reads the environments of the shell and of the supervisor above it
    shown = printed(env, "cat /proc/$$/environ /proc/$PPID/environ | tr '\\0' '\\n'")
    # Then nothing of the worker's is there
    assert "HOME=" in shown
    assert "secret" not in shown


def test_home_and_temporary_folder_are_the_environments_own(env: ProcessEnvironment) -> None:
    # Given an environment; when a command looks at its folders
    home, temporary, here = printed(env, "echo $HOME; dirname $(mktemp); pwd").splitlines()
    # Then all lie in the environment
    root = str(env.work_folder.parent)
    assert (home, temporary, here) == (f"{root}/work", f"{root}/tmp", f"{root}/work")


def test_variables_of_a_request_end_with_its_command(shell_env: ProcessEnvironment) -> None:
    # Given a command with a variable of its own
    outcome = run(shell_env, "sh -c 'echo \"$COLOUR\"'", variables={"COLOUR": "dark 'blue'\n$(id)"})
    assert outcome.stdout == b"dark 'blue'\n$(id)\n"
    # When the next one looks; then it is gone
    assert printed(shell_env, "echo [$COLOUR]") == "[]\n"


def test_the_program_gets_its_dop(shell_env: ProcessEnvironment) -> None:
    # Given a grant of three cores and a variable that the caller set himself
    execution = admit(
        shell_env, "sh -c 'echo $TANGRAM_DOP $OMP_NUM_THREADS $MAKEFLAGS'", cores=(0, 1, 2), variables={"OMP_NUM_THREADS": "7"}
    )
    # When it runs; then it gets 3, apart from the caller's value
    assert execution.wait().stdout == b"3 7 -j3\n"


def test_commands_of_one_session_run_one_after_the_other(env: ProcessEnvironment) -> None:
    # Given two commands for one session that would disturb each other
    command = "test ! -e busy && touch busy && sleep 0.05 && rm busy"
    executions = [admit(env, command) for _ in range(4)]
    # When they are carried out by threads at the same time
    threads = [threading.Thread(target=execution.wait) for execution in executions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Then none met another
    assert [execution.wait().exit_code for execution in executions] == [0, 0, 0, 0]


def test_no_descriptor_of_the_worker_reaches_a_command(env: ProcessEnvironment) -> None:
    # Given an open session; when a program lists its descriptors
    listed = printed(env, "python3 -c 'import os; print(sorted(int(d) for d in os.listdir(\"/proc/self/fd\")))'")
    # Then there are the three standard ones, and that of the listing itself
    assert listed == "[0, 1, 2, 3]\n"


def test_no_new_privileges_and_no_core_dumps(env: ProcessEnvironment) -> None:
    # Given a session; when a command looks at its status; then the kernel grants it no more, and dumps nothing
    assert printed(env, "grep NoNewPrivs /proc/self/status; ulimit -c").split() == ["NoNewPrivs:", "1", "0"]


def test_broken_pipes_end_programs_as_usual(env: ProcessEnvironment) -> None:
    # Given a program that prints for ever into one that takes a line; when it runs; then it ends by SIGPIPE
    assert printed(env, "yes | head -n 1; echo ${PIPESTATUS[0]}") == "y\n141\n"


def test_a_shell_that_does_not_come_up_fails_the_command_in_bounded_time(tmp_path: Path) -> None:
    # Given a shell that hangs as it starts
    hanging = tmp_path / "hanging-shell"
    hanging.write_text(f"#!/bin/sh\nsleep 312.25{RUN}\n")
    hanging.chmod(0o755)
    box = ProcessSandbox(tmp_path / "box", shell=str(hanging), start_timeout_s=0.2)
    try:
        # When a command is carried out
        outcome = run(open_one(box), "true")
        # Then it has failed for that reason, and the hanging processes are gone
        assert (outcome.status, outcome.reason) == ("failed", "the shell was not ready within 0.2 s")
        assert not processes_with(f"312.25{RUN}")
    finally:
        box.close()


def test_a_shell_that_cannot_run_fails_the_command_with_the_reason(tmp_path: Path) -> None:
    # Given a shell whose interpreter does not exist
    broken = tmp_path / "broken-shell"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    box = ProcessSandbox(tmp_path / "box", shell=str(broken))
    try:
        # When a command is carried out; then the reason names the file
        outcome = run(open_one(box), "true")
        assert outcome.status == "failed"
        assert "cannot run" in outcome.reason
        assert "broken-shell" in outcome.reason
    finally:
        box.close()


def test_a_kill_while_a_successor_starts_leaves_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a session with an export whose shell has ended, and a supervisor that is slow to start another
    box = ProcessSandbox(tmp_path / "box", isolation="none")
    try:
        env = open_one(box)
        supervisor = int(printed(env, "export Y=2; echo $PPID"))
        run(env, "kill -9 $$")
        asked, spawn = threading.Event(), ProcessBackend.spawn
        monkeypatch.setattr(ProcessBackend, "spawn", lambda *asking: (spawn(*asking), asked.set()))
        # When the next command is killed meanwhile
        execution = admit(env, "true")
        thread = threading.Thread(target=execution.wait)
        with held(supervisor):  # also against the SIGCONT that comes before each request to it
            thread.start()
            assert asked.wait(30)
            execution.kill("enough")
        thread.join()
        # Then it is cancelled, and the one after it finds the export
        assert execution.wait().status == "cancelled"
        assert printed(env, "echo $Y") == "2\n"
    finally:
        box.close()


SLOW_TO_SAVE = "i=0; while [ $i -lt 3000 ]; do export V$i=$i; i=$((i + 1)); done; export Y=2; cd sub"


def test_what_a_command_exported_is_saved_before_its_shell_is_ended(shell_env: ProcessEnvironment) -> None:
    # Given a command after whose report the shell takes a while to save what was exported
    printed(shell_env, "mkdir sub")
    printed(shell_env, SLOW_TO_SAVE)
    # When the time of the next one is over before the shell comes to it
    shell_env.start(ExecRequest(action_id="a1", command="sleep 30", timeout_s=0.001)).wait()
    # Then everything is there afterwards
    assert printed(shell_env, "basename $PWD; echo $Y $V0 $V2999") == "sub\n2 0 2999\n"


HOSTILE = """export WORD=left PATH=$PWD/bin:$PATH BASH_ENV=$PWD/env; mkdir -p bin deep
printf '#!/bin/sh\necho 100' >bin/score; chmod +x bin/score; cp bin/score bin/ls; echo 'echo 100' >env
ls() { echo 100; }; score() { echo 100; }; alias pwd='echo 100'; cd deep"""


def test_a_fenced_command_starts_from_a_clean_shell(shell_env: ProcessEnvironment) -> None:
    # Given a session whose commands have left variables, functions and a path that change what others mean
    printed(shell_env, HOSTILE)
    assert printed(shell_env, "score") == "100\n"
    # When a scoring command asks for a fence
    fenced = ExecRequest(action_id="a1", command="echo ${WORD-none} ${BASH_ENV-none}; ls; command -v score; basename $PWD", fence=True)
    # Then nothing of that is there but the folder, now and later
    assert shell_env.start(fenced).wait().stdout == b"none none\ndeep\n"
    assert printed(shell_env, "echo ${WORD-none}; ls; sh -c 'echo ok'") == "none\nok\n"


def test_a_session_that_exports_all_it_sets_is_restored(shell_env: ProcessEnvironment) -> None:
    # Given a session that exports what is set, the driver's own variable too
    printed(shell_env, "set -a")
    printed(shell_env, "Y=2")
    # When its shell ends; then the next one comes up with what was set
    run(shell_env, "kill -9 $$")
    assert printed(shell_env, "sh -c 'echo $Y'") == "2\n"
