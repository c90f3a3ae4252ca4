"""The shell texts behind SWE-ReX's verbs, and how what they print is read. Texts are plain POSIX shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

BAD_SYNTAX = "syntax"

IS_FOLDER = 21
"""The exit code by which a script says that a folder is where a file was expected."""

HANG_UP = r"for job in $(\jobs -p); do \kill -HUP $job; done; \exit 0"
"""What ends a shell as its terminal would: jobs that were not disowned get SIGHUP."""

_JOINED = r"\exec 2>&1"
"""What joins both streams. A backslash before a word keeps the shell from taking it for an alias, which a startup file may have set."""

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\^_]")


def start_text(sources: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return what makes a shell ready: exported variables, and files that it reads as an interactive shell would."""
    lines = [_JOINED, "PS1='$ '", "PS2=''", "shopt -s expand_aliases 2>/dev/null"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f"\\. {shlex.quote(path)}" for path in sources]
    return "\n".join([*lines, ":"])


def run_text(command: str, mark: str) -> str:
    """Return what runs a command in a shell, both streams in one; `is_wrong_syntax` says whether the shell could not read it.

    `mark` is a random word, which begins the output of a command that was not begun.

    A shell reads a whole line before it runs any of it. So a command of one line is its own check. Of several lines the first ones would
    run, so another shell reads them first.
    """
    if "\n" not in command:
        return f"\\eval {shlex.quote(f'{_JOINED}; {command}')}"
    check = f"if \"${{BASH:-sh}}\" -n <<'{mark}'\n{command}\n{mark}\n"
    return f"{check}then {_JOINED}; \\eval {shlex.quote(command)}\nelse \\printf %s '{mark} {BAD_SYNTAX}'; (\\exit 2); fi"


def is_wrong_syntax(stdout: str, stderr: str, exit_code: int | None, mark: str) -> bool:
    """Say whether a command was not begun because the shell could not read it.

    What a command prints is in `stdout`, as it begins with joining the streams. So what is in `stderr` was said before.
    """
    refused = not stdout and bool(stderr) and exit_code not in (None, 0) and "warning: here-document" not in stderr
    return refused or stdout.rstrip() == f"{mark} {BAD_SYNTAX}"


def may_write_text(folder: str) -> str:
    """Return what says whether files can be made in a folder, or whether it is not there yet."""
    return f"test -w {_folder(folder)} || test ! -e {_folder(folder)}"


def replace_text(folder: str, kept: str, name: str) -> str:
    """Return what gives a file of a folder another name, and the permissions of what has that; a link goes on leading where it leads.

    `kept` may be of another folder, named by its whole path. It is written over what has the name where that is in a folder that may not
    be written.
    """
    own = shlex.quote(f"./{name}")
    return f"""( cd -- {_folder(folder)} || exit
to=$(readlink -f -- {own}) || to={own}
[ ! -d "$to" ] || exit {IS_FOLDER}
fail() {{ printf '%s: %s\\n' "$to" "$1" >&2; exit 1; }}
if [ -f "$to" ]; then [ -w "$to" ] || fail "Permission denied"
elif [ -e "$to" ] || [ -L "$to" ]; then fail "no regular file"; fi
[ -w "${{to%/*}}" ] || {{ cat <{kept} >"$to" && rm -f {kept}; exit; }}
[ ! -e "$to" ] || chmod "$(stat -c %a -- "$to")" {kept}
mv -f -- {kept} "$to" )"""


def unpack_text(folder: str, archive: str) -> str:
    """Return what unpacks a tar archive into the folder that it is in."""
    return f"( cd -- {_folder(folder)} && tar -xof {archive} && rm -f {archive} )"


def remove_text(folder: str, archive: str) -> str:
    """Return what removes the file of an upload that failed."""
    return f"( cd -- {_folder(folder)} && rm -f {archive} )"


def _folder(path: str) -> str:
    """Return a folder as a word of a shell, where `~` leads home as it does in calls for files."""
    home, slash, rest = path.partition("/")
    return f'"$HOME"{shlex.quote(slash + rest)}' if home == "~" else shlex.quote(path)


def plain(output: str) -> str:
    """Return what a program printed without the control sequences of terminals."""
    return _ESCAPES.sub("", output).replace("\r\n", "\n")
