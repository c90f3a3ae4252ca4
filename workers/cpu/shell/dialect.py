"""The shell side of the protocol between a worker and a session: the driver that a shell runs, and a command's text.

Only text is made here. The driver is a loop that reports on the FIFO `done`, saves what a successor needs in `state`,
waits on the FIFO `go` and evaluates `text`. Why it looks as it does:

1. The FIFOs are opened by path for each run and closed before a command runs. So a command inherits nothing of the
   protocol, and cannot read or write its messages by accident. Each run has a random name, which a report repeats.
2. The report stands in the *condition* of the inner loop, so a command that says `continue` reports too; one that
   says `break` ends the inner loop, and the outer one enters it again. Neither sets the exit code, so the report says 1 and the
   command is told. `break 2` ends both loops, and the shell with code 1.
3. Both loops are `until`: under `set -n` no command runs and every status is 0, which ends `until` but would make
   `while` spin. The shell then ends, and a fresh one starts.
4. While a command runs, the shell's own descriptors are those of the command: what an EXIT trap prints is the command's, too. They
   are set anew for each, so `exec >&-` inside lasts for that command only.
5. Per-command variables stand before `eval`, so they end with it. `command eval` keeps a syntax error from ending a
   POSIX shell; `builtin` in bash and `command` in others step over functions of the same name, and are themselves freed of such. A
   backslash before a word keeps the shell from taking it for an alias. The driver needs none: it is read before there are aliases.
6. Saving comes after the report: it takes no time of the command. A shell that has just started has nothing to save, so
   one that is ended before its first run leaves the state whole. Any other may be ended once `awaits_run` says so.
7. The worker opens `go` and `done` for a run only, so an idle session costs it one descriptor. A shell that opened `go`
   just before the worker closed it reads nothing, and opens it again. The assignment there ends a shell in which a
   command has made the variable read-only; it would never read the name of a run.
8. A shell that cannot report, since a command took its descriptors (`ulimit -n 3`), ends with the code of that command. The report takes
   as many as the beginning of the next command, which would otherwise end with a code that is not its own (`ulimit -n 12`).
9. What keeps a command from beginning is found before its streams are opened, and told as a word between the name of the run and the
   code. A program of its own opens them once it is in its folder, so it has not begun where they were not opened.
10. A shell writes its state over the one before, in the same file. A file system writes a file that was emptied, or that a rename
   replaces, to the disk at once, and the command would wait for that. The state ends with `return`; what is left of an earlier state
   follows. Until the state is complete, its first line is `return`, too. A shell may be ended as it saves, and half of a value, with the
   rest of an earlier one, would run as code. The state does not go through the standard output, where a DEBUG trap may print. bash
   is not traced meanwhile, as BASH_XTRACEFD may name a descriptor of the state. Aliases come before the functions, of which one may be
   named `alias`. They are expanded only from the end of the state on, as they would change what it says. A variable
   or a startup file may have turned that on: POSIXLY_CORRECT, BASH_ENV.
11. A program may be missing, or earlier commands may have put it out of reach. The PATH with which the shell starts, before it reads the
   saved state, tells which. The first is the caller's error, the second an exit code as of any shell.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workers.cpu.abstract import SHELL_NAME, ExecRequest
from workers.cpu.errors import FolderUnusable, NoSuchFolder, NoSuchProgram, ProgramUnusable, SandboxError, SessionUnavailable

# One line when joined, so that the line numbers in a command's error messages are those of the command.
_BASH = " ".join(
    (
        "__tangram_path=$PATH; if test -f {state}; then . {state}; fi;",
        "unset -f builtin command; builtin unset __tangram_run; __tangram_code=0;",
        "until ! :; do :;",
        "until unset -f builtin command; case $__tangram_code in '') builtin printf '%s\\n' {left} >&2; __tangram_code=1;; esac;",
        "command exec </dev/null >/dev/null 2>&1;",
        """builtin printf '%s %s\\n' "${{__tangram_run-ready}}" "$__tangram_code" <&2 2>&0 >|{done} || builtin exit "$__tangram_code";""",
        "case $- in *x*) builtin set +x; __tangram_code=x;; esac;",
        "case ${{__tangram_run+set}} in set) {{ builtin printf '%s\\n' return >&6 && builtin export -p >&6 &&",
        "builtin printf '%s\\n' '\\builtin shopt -u expand_aliases' >&6 && builtin alias -p >&6 &&",
        "builtin declare -f >&6 && builtin printf '%s\\n' 'unset -f builtin'",
        """\"case :${{BASHOPTS-}}: in *:expand_aliases:*) builtin shopt -s expand_aliases;; esac\" '\\builtin return' >&6 &&""",
        "builtin printf '%6s\\n' : >&7; }} 6<>{state} 7<>{state};; esac;",
        "case $__tangram_code in x) builtin set -x;; esac;",
        "until builtin read -r __tangram_run <{go}; do builtin test -p {go} && __tangram_run= || builtin exit; done;",
        "builtin read -r -d '' __tangram_text <{text} || builtin exit;",
        "builtin false;",
        """do __tangram_code=; builtin eval "$__tangram_text"; __tangram_code=$?; done;""",
        "done; unset -f builtin command; builtin printf '%s\\n' {left} >&2; builtin exit 1",
    )
)
_POSIX = " ".join(
    (
        "__tangram_path=$PATH; if test -f {state}; then . {state}; fi;",
        "unset -f command; unset __tangram_run; __tangram_code=0;",
        "until ! :; do :;",
        "until unset -f command; case $__tangram_code in '') command printf '%s\\n' {left} >&2; __tangram_code=1;; esac;",
        "command exec </dev/null >/dev/null 2>&1;",
        """{{ {{ command printf '%s %s\\n' "${{__tangram_run-ready}}" "$__tangram_code" <&2 2>&0; }} <&2; }} >|{done} ||""",
        """exit "$__tangram_code";""",
        "case ${{__tangram_run+set}} in set) {{ command printf '%s\\n' return >&6 && export -p >&6 && command printf '%s\\n' return >&6 &&",
        "command printf '%6s\\n' : >&7; }} 6<>{state} 7<>{state};; esac;",
        "until command read -r __tangram_run <{go}; do command test -p {go} && __tangram_run= || exit; done;",
        "false;",
        "do __tangram_code=; command . {text}; __tangram_code=$?; done;",
        "done; unset -f command; command printf '%s\\n' {left} >&2; exit 1",
    )
)


LEFT_LOOP = "break, continue: only meaningful in a loop: the rest of the command did not run"
"""What a command prints at its end that has left the loop of the driver."""

READ_BY_SHELL, WRITTEN_BY_SHELL = 0o644, 0o666
"""Modes of files and FIFOs in the folder of a session."""

FRESH = ".new"
"""The end of the name of a file in the folder of a session that is being written."""

DEFAULT_PATH = "/bin:/usr/bin"
"""Where a program is searched whose environment has no PATH."""

REFUSALS: Mapping[str, type[SandboxError]] = {
    refusal.__name__: refusal for refusal in (NoSuchFolder, FolderUnusable, NoSuchProgram, ProgramUnusable)
}
"""What keeps a command from beginning, by the word that says so in a report."""


def started(words: Sequence[str], path: str | None) -> tuple[str, str | None]:
    """Return the program that `words` start, also by `env`, and the PATH on which it is searched; none is that of the shell."""
    if words[0] != "env":
        return words[0], path
    for word in words[1:]:
        name, assigns, value = word.partition("=")
        if not assigns and word != "-i":
            return word, path
        path = DEFAULT_PATH if word == "-i" else value if name == "PATH" else path
    return words[0], path


def refusal(word: str, cwd: str | None, words: Sequence[str] | None, folder: str | None) -> SandboxError:
    """Return what kept a command from beginning in a folder, or by a program and arguments; without a word it is the folder.

    `folder` is where the shell is, as far as that is known.
    """
    subject, where = f"cwd {cwd!r}", ""
    if words and "Program" in word:
        subject = f"program {started(words, None)[0]!r}"
    elif folder and cwd and cwd != "~" and not cwd.startswith(("/", "~/")):
        where = f"; the session is in {folder!a}"
    problem = "does not exist" if word.startswith("NoSuch") else "cannot be used"
    return REFUSALS.get(word, FolderUnusable)(f"{subject} {problem}{where}")


@dataclass(frozen=True, slots=True)
class ProtocolFolder:
    """The folder of a session's protocol files, and the file with its saved state; each also as the shell sees it.

    Shells may run as another user than the worker. They can neither remove a file nor write one that only the worker writes. The
    shell writes the state, so that lies in another folder. The folder itself can then be mounted read-only. (FIFOs can be
    written all the same.)
    """

    folder: str
    inside: str
    state: str
    """The file with the exported variables, the functions and in bash the aliases, as of the last report."""
    state_inside: str

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return os.path.basename(self.folder)

    @property
    def go(self) -> str:
        """Return the FIFO that names the next run."""
        return f"{self.folder}/go"

    @property
    def done(self) -> str:
        """Return the FIFO on which a run is reported."""
        return f"{self.folder}/done"

    @property
    def text(self) -> str:
        """Return the file with the text to evaluate."""
        return f"{self.folder}/text"

    def seen(self, path: str) -> str:
        """Return one of these files as the shell sees it."""
        return self.state_inside if path == self.state else f"{self.inside}/{os.path.basename(path)}"

    def make(self) -> None:
        """Make the folder and the FIFOs for runs."""
        os.makedirs(self.folder, exist_ok=True)
        # The worker's umask must not keep a shell of another user out.
        os.chmod(self.folder, 0o755)
        make_fifo(self.go, READ_BY_SHELL)
        make_fifo(self.done, WRITTEN_BY_SHELL)

    def awaits_run(self) -> bool:
        """Return whether a shell waits for its next run, so that it has saved its state; it must not have been given one.

        A FIFO can be opened for writing alone once somebody has it open for reading, or is about to.
        """
        try:
            os.close(os.open(self.go, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            # Where commands have removed the FIFO, no shell will ever wait on it.
            return error.errno != errno.ENXIO
        return True

    def write(self, path: str, content: bytes, mode: int = READ_BY_SHELL) -> None:
        """Write one of these files: a fresh one, as whoever has the last one open could hold a lease on it.

        It is there whole or not at all, and until then the last one is: a worker may be killed at any moment.
        """
        remove_file(fresh := path + FRESH)
        make_file(fresh, mode, content)
        os.rename(fresh, path)

    def write_text(self, content: bytes) -> None:
        """Write the text to evaluate over the last one, which no shell reads any more.

        Where that file cannot be opened at once, because somebody has a lease on it or there is none yet, the text goes to a fresh file.
        """
        try:
            overwrite_file(self.text, content)
        except OSError:
            remove_file(self.text)
            make_file(self.text, READ_BY_SHELL, content)

    def remove(self, *prefixes: str) -> bool:
        """Remove the files of this folder whose names begin so; return whether there were any. None are there once the folder is gone."""
        found = False
        with contextlib.suppress(FileNotFoundError):
            for file in os.scandir(self.folder):
                if file.name.startswith(prefixes):
                    os.unlink(file)
                    found = True
        return found

    def keep_state(self) -> None:
        """Make the file of the state where there is none; the shell rewrites it after each run."""
        if not os.path.exists(self.state):
            self.write(self.state, b"", WRITTEN_BY_SHELL)


def make_fifo(path: str, mode: int) -> None:
    """Make a FIFO of just this mode, whatever the umask."""
    os.mkfifo(path, 0o600)
    os.chmod(path, mode)


def remove_file(path: str) -> None:
    """Remove a file; nothing where it is gone. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def overwrite_file(path: str, content: bytes) -> None:
    """Write a file anew that others may have open, or replaced by anything. Raises `OSError` where it cannot be opened at once."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _write_all(descriptor, content)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def make_file(path: str, mode: int, content: bytes = b"") -> None:
    """Make a file of just this mode, whatever the umask."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, mode)
        _write_all(descriptor, content)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A shell program and how it is driven."""

    program: str
    is_bash: bool

    @classmethod
    def of(cls, program: str) -> Dialect:
        """Return the dialect of a program, by its name."""
        return cls(program, os.path.basename(program) == "bash")

    @classmethod
    def find(cls, program: str | None) -> Dialect:
        """Return the dialect of `program`, by default of bash if there is one, else of sh.

        Raises `SessionUnavailable` when there is no such program.
        """
        wanted = program or shutil.which("bash") or "/bin/sh"
        found = shutil.which(wanted)
        if found is None:
            raise SessionUnavailable(f"no shell: {wanted} is not an executable file")
        return cls.of(os.path.abspath(found))

    def argv(self, control: ProtocolFolder) -> list[str]:
        """Return the command line of a session's shell."""
        template = _BASH if self.is_bash else _POSIX
        names = {name: shlex.quote(control.seen(getattr(control, name))) for name in ("go", "done", "text", "state")}
        driver = template.format(**names, left=shlex.quote(LEFT_LOOP))
        flags = ["--norc", "--noprofile"] if self.is_bash else []
        return [self.program, *flags, "-c", driver, os.path.basename(self.program)]

    def text(self, asked: ExecRequest, words: Sequence[str] | None, variables: Mapping[str, str], streams: tuple[str, str, str]) -> bytes:
        """Return what the driver evaluates to carry out a command, with three files as its input, output and standard error.

        The command is that of the request, or the program and arguments `words`.
        """
        assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items() if SHELL_NAME.fullmatch(name))
        odd = [f"{name}={value}" for name, value in variables.items() if not SHELL_NAME.fullmatch(name)]
        stdin, stdout, stderr = map(shlex.quote, streams)
        redirected = f"<{stdin} >{stdout} {'2>&1' if asked.merged else f'2>{stderr}'}"
        folder = None if asked.cwd is None else _word(asked.cwd)
        go = "" if folder is None else f"{self._own} cd -- {folder} && "
        if words is None:
            line = f"{go}\\command exec {redirected} && {assigned} \\command eval {shlex.quote(asked.command)}"
        else:
            exports = f"\\export {assigned}; " if assigned else ""
            started_by = ["env", "--", *odd] if odd else []  # which no shell can export
            line = f"( {exports}{go}{self._own} exec {shlex.join([*started_by, *words])} {redirected} )"
            if asked.terminal is not None:
                # It becomes the controlling one of a session whose leader opens it. What is typed then interrupts the leader, too.
                line = f"\\command exec <{stdin} && \\command trap : INT QUIT && {line}"
        for test, word in self._conditions(folder, words, variables.get("PATH")):
            line = f'if {test}; then {line}; else __tangram_run="$__tangram_run {word}"; fi'
        # bash reads up to a NUL; a sourced file ends with its last line.
        return line.encode("utf-8", "surrogateescape") + (b"\0" if self.is_bash else b"\n")

    def _conditions(self, folder: str | None, words: Sequence[str] | None, path: str | None) -> Iterator[tuple[str, str]]:
        """Yield what must hold for a command to begin, and the error's class where it does not; the first to be tried is the last."""
        program, path = ("", path) if words is None else started(words, path)
        if "/" in program:
            program = ("" if folder is None or program.startswith("/") else f"{folder}/") + shlex.quote(program)
            yield f"{self._own} test -f {program} && {self._own} test -x {program}", ProgramUnusable.__name__
            yield f"{self._own} test -e {program}", NoSuchProgram.__name__
        elif program:
            # Where commands have changed the session's PATH so that a program is not found, that is their doing.
            searched = ['"$PATH"', '"${__tangram_path-}"'] if path is None else [shlex.quote(path)]
            yield " || ".join(self._finds(shlex.quote(program), each) for each in searched), NoSuchProgram.__name__
        if folder is not None:
            yield f"{self._own} test -d {folder} && {self._own} test -x {folder}", FolderUnusable.__name__
            yield f"{self._own} test -e {folder}", NoSuchFolder.__name__

    def _finds(self, program: str, searched: str) -> str:
        """Return what succeeds where a program is on the PATH `searched`, whatever functions and builtins have its name."""
        if self.is_bash:
            return f"PATH={searched} \\builtin type -P -- {program} >/dev/null"
        file = f'"$folder"/{program}'
        looks = f"for folder in $PATH; do \\command test -f {file} && \\command test -x {file} && \\exit; done; \\exit 1"
        return f"( PATH={searched}; IFS=:; {looks} )"

    @property
    def _own(self) -> str:
        """Return what makes a shell take a name for its own command, whatever functions and aliases there are."""
        return "\\builtin" if self.is_bash else "\\command"


def _word(path: str) -> str:
    """Return a path as a word of a shell: `~` is the home folder, and nothing else in it has a meaning."""
    home, slash, rest = path.partition("/")
    if home == "~":
        return f'"$HOME"{shlex.quote(slash + rest) if slash else ""}'
    return shlex.quote(path if path.startswith("/") else f"./{path}")
