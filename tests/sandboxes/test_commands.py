"""The protocol between worker and shell survives whatever a command does."""

from __future__ import annotations

import re

from tests.workers_cpu.support import printed, run
from workers.cpu.abstract import Environment
from workers.cpu.shell.dialect import LEFT_LOOP

# Those that leave nothing behind in their session, or end its shell
BY_EXIT_CODE = {
    "true": 0,
    "false": 1,
    "(exit 42)": 42,
    "exit 3": 3,
    "no-such-program-anywhere": 127,
    "exec true": 0,
    "exec sh -c 'exit 5'": 5,
    "kill -9 $$": 137,
    "kill -TERM $$": 143,
    "trap 'exit 9' TERM; kill $$; sleep 5": 9,
    "trap 'exit 4' EXIT; exit 3": 4,
    "while :; do break; done": 0,
    "exec 1>&-": 0,
    "exec 0<&- 1>&- 2>&-": 0,
    "exec 3>&1 4>&2 5</dev/null 9>&1": 0,
    "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-": 0,
    'cat; read line; test -z "$line"': 0,
    "cd /; cd no-such-folder; true": 0,
    "# only a comment": 0,
    "": 0,
    "   \n\n ": 0,
    "wait": 0,
    "printf 'ready 0\\n0 0\\n' >&2; echo ready 0": 0,
    "set -e; false; echo not reached": 1,
    "ulimit -n 0": 0,
    "ulimit -n 3": 0,
    "ulimit -n 3; (exit 7)": 7,
}
CHANGES = [
    "{ sleep 30 & } ; :",
    "set -n",
    "trap 'echo trapped' USR1; kill -USR1 $$",
    "unset PATH; unset HOME PWD; :",
    "IFS=0123456789abcdef; x=1",
    "set -f; set -C; set -u; :",
    "PS4='$(exit 3)'; set -x; :",
    "umask 777; :",
    "alias read=false printf=false eval=false test=false; :",
]
WRONG = ["echo 'unbalanced", 'echo "unbalanced', "if then", ")", "(", "for", "case x in", "cat <<", "${"]


def ends_with(environment: Environment, command: str, exit_code: int, session: str) -> None:
    printed(environment, ":", session)
    outcome = run(environment, command, session=session)
    assert (outcome.status, outcome.exit_code) == ("succeeded", exit_code), (command, outcome)
    assert printed(environment, "echo alive; exec 9>&-", session) == "alive\n", command


def test_a_command_ends_with_its_exit_code_and_the_session_goes_on(shell_env: Environment) -> None:
    for command, exit_code in BY_EXIT_CODE.items():
        ends_with(shell_env, command, exit_code, "main")


def test_a_command_begins_however_few_descriptors_the_one_before_has_left(shell_env: Environment) -> None:
    for most in (5, 6, 8, 11, 12, 13, 14):
        run(shell_env, f"ulimit -n {most}")
        assert printed(shell_env, "echo alive") == "alive\n", most


def test_a_session_goes_on_whatever_a_command_changes_in_it(shell_env: Environment) -> None:
    for number, command in enumerate(CHANGES):
        ends_with(shell_env, command, 0, f"s{number}")


def test_a_syntax_error_is_reported_and_leaves_the_state(shell_env: Environment) -> None:
    printed(shell_env, "kept=yes")
    for command in WRONG:
        outcome = run(shell_env, command)
        assert outcome.status == "succeeded" and outcome.exit_code not in (0, None) and outcome.stderr, (command, outcome)
        assert printed(shell_env, "echo $kept") == "yes\n"


def test_an_error_message_has_the_commands_own_line_number(env: Environment) -> None:
    outcome = run(env, "echo one\nno-such-program\necho three")
    assert re.search(rb"2: .*no-such-program", outcome.stderr)
    assert outcome.stdout == b"one\nthree\n"


PRINTS = {
    "printf 'no newline'": b"no newline",
    r"printf '\377\376\000\001'": b"\xff\xfe\x00\x01",
    "cat <<'END'\nit's \"quoted\" $HOME `ls` \\\nEND": b'it\'s "quoted" $HOME `ls` \\\n',
    "cat <<END\n$((6 * 7))\nEND\n": b"42\n",
    "echo 'a'\"b\"c\\'d": b"abc'd\n",
    "echo één 猫": "één 猫\n".encode(),
    "f() {\n  echo \"$1\"\n}\nf 'x  y'": b"x  y\n",
    "exec 7>seven; echo lucky >&7; exec 7>&-; cat seven": b"lucky\n",
    "cat; echo end": b"end\n",
    "wc -c": b"0\n",
    "(echo in-subshell; exit 3) || echo $?": b"in-subshell\n3\n",
    "x=1; unset x; echo ${x-unset}": b"unset\n",
    "{ yes; echo $? >code; } | head -n 1; cat code": b"y\n141\n",
}


def test_output_arrives_byte_by_byte(shell_env: Environment) -> None:
    for command, stdout in PRINTS.items():
        outcome = run(shell_env, command)
        assert (outcome.status, outcome.stdout) == ("succeeded", stdout), command
        assert printed(shell_env, "echo next") == "next\n"


def test_a_function_named_like_a_builtin_of_the_driver_changes_nothing(bash_env: Environment) -> None:
    for names in ("eval read printf test exit export", "builtin", "command", "builtin command read"):
        assert run(bash_env, "; ".join(f"{name}() {{ :; }}" for name in names.split())).exit_code == 0, names
        assert printed(bash_env, "echo real") == "real\n", names


def test_a_command_that_leaves_a_loop_in_which_it_is_not_has_failed_and_is_told(shell_env: Environment) -> None:
    for word in ("break", "continue"):
        # When a command stops short since it took itself to be in a loop; then that is no success
        done = run(shell_env, f"echo before; {word}; echo after; exit 3")
        assert (done.exit_code, done.stdout, done.stderr) in (
            (1, b"before\n", f"{LEFT_LOOP}\n".encode()),
            (3, b"before\nafter\n", b""),  # some shells go on
        ), word
        assert printed(shell_env, "for i in 1 2; do echo $i; break; done; echo alive") == "1\nalive\n"
    # And one that leaves more loops than there are is no success either, though its shell may end by that
    done = run(shell_env, "while :; do break 3; done; exit 3")
    assert done.exit_code == 3 or (done.exit_code == 1 and done.stderr == f"{LEFT_LOOP}\n".encode())
    assert printed(shell_env, "echo alive") == "alive\n"


def test_a_command_whose_shell_ends_before_taking_it_runs_in_the_next(shell_env: Environment) -> None:
    # Given a command after whose report the shell can take no other: the driver's own variable is read-only
    run(shell_env, "readonly __tangram_run")
    assert printed(shell_env, "echo alive | tee -a file; cat file") == "alive\nalive\n"


def test_closing_stdout_lasts_for_one_command(shell_env: Environment) -> None:
    printed(shell_env, "exec >elsewhere; echo hidden")
    assert printed(shell_env, "echo shown; cat elsewhere") == "shown\nhidden\n"
