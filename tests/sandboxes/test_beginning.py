"""Where a command begins, by which program, and what keeps it from beginning: that is the caller's error, and no exit code."""

from __future__ import annotations

import pytest

from tangram.arguments import MOST_WORD_BYTES
from tangram.errors import InvalidAction
from tests.workers_cpu.support import admit, printed, run
from workers.cpu.abstract import Environment, WindowSize
from workers.cpu.errors import FolderUnusable, NoSuchFolder, NoSuchProgram, ProgramUnusable, SandboxError

SH = ["sh", "-c"]

REFUSED = [
    (NoSuchFolder, "cwd '/testbed' does not exist", {"cwd": "/testbed"}),
    (NoSuchFolder, "cwd '~/a b' does not exist", {"cwd": "~/a b", "interpreter": SH}),
    (FolderUnusable, "cwd 'file' cannot be used; the session is in 'HERE'", {"cwd": "file"}),
    (FolderUnusable, "cwd 'file' cannot be used; the session is in 'HERE'", {"cwd": "file", "interpreter": SH}),
    (NoSuchFolder, "cwd 'nowhere' does not exist; the session is in 'HERE'", {"cwd": "nowhere", "interpreter": ["no-such-program"]}),
    (NoSuchProgram, "program 'no-such-program' does not exist", {"interpreter": ["no-such-program"]}),
    (NoSuchProgram, "program './run' does not exist", {"interpreter": ["./run"], "cwd": "empty"}),
    (NoSuchProgram, "program 'cd' does not exist", {"interpreter": ["env", "-i", "PATH=/nowhere", "cd"]}),
    (NoSuchProgram, "program 'sh' does not exist", {"interpreter": SH, "variables": {"PATH": "/nowhere"}}),
    (NoSuchProgram, "program 'no-such-program' does not exist", {"interpreter": ["env", "-i", "A=b", "no-such-program"]}),
    (NoSuchProgram, "program 'sh' does not exist", {"interpreter": ["env", "PATH=/nowhere", *SH]}),
    (ProgramUnusable, "program './file' cannot be used", {"interpreter": ["./file"]}),
    (ProgramUnusable, "program './empty' cannot be used", {"interpreter": ["./empty"]}),
    (NoSuchFolder, "cwd '/testbed' does not exist", {"cwd": "/testbed", "terminal": WindowSize(24, 80)}),
]


@pytest.fixture
def with_files(shell_env: Environment) -> Environment:
    """Give an environment with a program, a file and an empty folder, whose session has a function of the names that are used."""
    printed(shell_env, "test() { :; }; cd() { :; }; echo 'echo ran $1' > run; chmod +x run; echo > file; mkdir empty")
    return shell_env


def test_what_cannot_begin_is_the_callers_error_and_leaves_no_trace(with_files: Environment) -> None:
    here = printed(with_files, "pwd").strip()
    for kind, message, how in REFUSED:
        with pytest.raises(SandboxError) as refused:
            admit(with_files, "touch begun; exit 1", **how).wait()  # type: ignore[arg-type]
        said = str(refused.value).replace(here, "HERE")
        assert (type(refused.value), said, refused.value.fault) == (kind, message, "caller"), how
        assert printed(with_files, "ls; set -e; set +e") == "empty\nfile\nrun\n", how


def test_a_program_that_earlier_commands_put_out_of_reach_is_their_failure(with_files: Environment) -> None:
    # Given a session whose PATH a command has damaged; and another shell of it, which starts with the saved state
    for damage in ("export PATH=/nowhere", "export PATH=/nowhere; kill -9 $$"):
        admit(with_files, damage).wait()
        done = admit(with_files, "echo out", interpreter=SH).wait()
        # (Busybox has the program in itself, and needs no PATH.)
        assert (done.exit_code, b"not found" in done.stderr) == (127, True) or done.stdout == b"out\n", (damage, done)
        with pytest.raises(NoSuchProgram):
            admit(with_files, "x", interpreter=["no-such-program"]).wait()


def test_a_program_of_its_own_leaves_nothing_in_its_session(with_files: Environment) -> None:
    done = admit(with_files, "cd /; A=b; echo out; echo err >&2; exit 3", interpreter=SH, cwd="empty").wait()
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    assert printed(with_files, 'echo "${A-unset}" "${PWD##*/}"') == f"unset {printed(with_files, 'pwd').rpartition('/')[2]}"
    # A name that is looked for is that of a program, and its place follows the folder
    assert admit(with_files, "x", interpreter=["../run"], cwd="empty").wait().stdout == b"ran x\n"
    assert admit(with_files, "it's", interpreter=["sh", "-c", 'echo "$1 $2"', "sh", "a b"]).wait().stdout == b"a b it's\n"
    assert admit(with_files, "ls", interpreter=[], cwd="empty").wait().stdout == b""


def test_a_folder_is_where_the_session_stays(with_files: Environment) -> None:
    assert admit(with_files, "pwd", cwd="/tmp").wait().stdout == printed(with_files, "pwd").encode() == b"/tmp\n"
    assert admit(with_files, "ls", cwd="~").wait().stdout == b"empty\nfile\nrun\n"


def test_merged_output_is_in_the_order_of_writing(shell_env: Environment) -> None:
    for how in ({}, {"interpreter": SH}):
        done = admit(shell_env, "echo a; echo b >&2; echo c; echo d >&2", merged=True, **how).wait()  # type: ignore[arg-type]
        assert (done.stdout, done.stderr) == (b"a\nb\nc\nd\n", b"")


def test_a_text_of_any_length_runs(shell_env: Environment) -> None:
    long = "".join(f"line {number} 'quoted'\n" for number in range(20_000))
    text = f"cat >big <<'END'\n{long}END\necho $# $0 \"$1\"; exit 4"
    for interpreter in (SH, ["sh", "-ec"], ["env", "-i", "PATH=/bin:/usr/bin", *SH]):
        done = admit(shell_env, text, interpreter=interpreter).wait()
        assert (done.exit_code, done.stdout, done.stderr) == (4, b"0 sh \n", b""), interpreter
    assert run(shell_env, text).exit_code == 4 and shell_env.read_file("big").decode() == long


def test_what_no_program_can_be_handed_is_refused(env: Environment) -> None:
    word = "x" * (MOST_WORD_BYTES + 1)
    for how in ({"interpreter": ["printf"]}, {"interpreter": ["sh", "-c", ":"]}, {"interpreter": ["python3", "-c"]}):
        with pytest.raises(InvalidAction, match=f"at most {MOST_WORD_BYTES} bytes"):
            admit(env, word, **how)  # type: ignore[arg-type]
    longest = admit(env, word[1:], interpreter=["sh", "-c", 'echo "${#1}"', "sh"]).wait()
    assert longest.stdout == f"{MOST_WORD_BYTES}\n".encode()
