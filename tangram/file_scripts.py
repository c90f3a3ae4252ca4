"""Shell scripts that work on files of an environment, and what they show.

They are POSIX shell with `find`, `stat`, `readlink` and `tar`, as GNU and BusyBox have them. What they show are records that end by NUL,
since no name has that: the path, the entries, then each link and where it leads. Relative paths begin in the folder in which the script
runs, `~` is `$HOME`.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

INVALID, MISSING, EXISTS = 40, 44, 49
"""Exit codes by which a script says that a path cannot be used, does not exist, or exists already."""

_NOT_RUN, _MISSING_TOOLS = 126, (126, 127)
_NO_ROOM = re.compile("[Cc]an(not|'t) fork|Resource temporarily unavailable|Cannot allocate memory")

DEEPEST = 100_000
"""Deeper folders are as deep as their depth can be said to `find`; no path there could be named."""

FROM_TEXT = 't=$(mktemp) && trap \'rm -f "$t"\' EXIT && base64 -d >"$t" || exit\n'
TO_TEXT = "t=$(mktemp) && trap 'rm -f \"$t\"' EXIT || exit\n"
"""Beginnings of scripts that need a file: one with what their text is the base64 of, and an empty one."""

_ENTRY = "//"
"""What each entry begins with; the relative paths that `find` shows never have it."""

_STAT_ENTRY = f"stat -c '{_ENTRY}%f %s %Y %U %G %A %n' --"

_PRELUDE = f"""
export LC_ALL=C
fail() {{ printf '%s\\n' "$2" >&2; exit "$1"; }}
whole() {{ case $1 in "~") p=$HOME ;; "~/"*) p=$HOME/${{1#"~/"}} ;; /*) p=$1 ;; *) p=$(pwd)/$1 ;; esac; }}
there() {{ [ -e "$1" ] || [ -L "$1" ] || fail {MISSING} "path $1 does not exist"; }}
regular() {{ there "$1"; [ -f "$1" ] || fail {INVALID} "path $1 is no regular file"; }}
literal() {{ case $(tar --version 2>&1) in *GNU*) printf %s --no-unquote ;; esac; }}
links='for f; do printf "%s\\0" "$f"; readlink -n -- "$f"; printf "\\0"; done'
show() {{
  printf '%s\\0' "$1"; stat -c '{_ENTRY}%f %s %Y %U %G %A .' -- "$1" || exit; printf '\\0'
  [ ! -L "$1" ] || {{ printf '.\\0'; readlink -n -- "$1"; printf '\\0'; }}
}}
"""

STAT = _PRELUDE + 'whole "$1"; there "$p"; show "$p"'

EXISTING = _PRELUDE + 'for f; do whole "$f"; if [ -e "$p" ] || [ -L "$p" ]; then printf 1; else printf 0; fi; done'

LIST = f"""{_PRELUDE}
whole "$1"; there "$p"
[ -d "$p" ] || fail {INVALID} "path $p is no directory"
printf '%s\\0' "$p"
cd -- "$p" || exit
find . -mindepth 1 -maxdepth "$2" -exec {_STAT_ENTRY} {{}} + || exit
printf '\\0'
find . -mindepth 1 -maxdepth "$2" -type l -exec sh -c "$links" sh {{}} +
"""

MAKE = f"""{_PRELUDE}
whole "$1"
[ ! -d "$p" ] || fail {EXISTS} "directory $p exists already"
[ ! -e "$p" ] || fail {INVALID} "path $p exists and is no directory"
mkdir -p -- "$p" && show "$p"
"""

MAKE_ALL = _PRELUDE + 'for f; do whole "$f"; mkdir -p -- "$p" || exit; done'

MOVE = f"""{_PRELUDE}
whole "$1"; from=$p; there "$from"
whole "$2"
[ ! -d "$p" ] || fail {INVALID} "path $p is a directory"
folder=${{p%/*}}; mkdir -p -- "${{folder:-/}}" && mv -f -- "$from" "$p" && show "$p"
"""

REMOVE = _PRELUDE + 'for f; do whole "$f"; rm -rf -- "$p" || exit; done'

PACK_FILES = f"""{_PRELUDE}
to=$1; shift; n=$#
for f; do whole "$f"; regular "$p"; set -- "$@" ".$p"; done
shift "$n"; tar -chf "$to" $(literal) -C / "$@"
"""
"""Make the archive $1 of regular files, in order. GNU's tar takes backslashes in names that it is given, also after -C, for those of C."""

PACK = f"""{_PRELUDE}
whole "$2"; there "$p"
if [ -d "$p" ]; then cd -- "$p" && tar -cf "$1" .; else regular "$p"; tar -chf "$1" $(literal) -C / ".$p"; fi
"""
"""Make the archive $1 of what is in a folder, or of one file."""

UNPACK = _PRELUDE + 'whole "$2"; mkdir -p -- "$p" && cd -- "$p" && tar -xof "$1"'
"""Unpack the archive $1 into a folder."""

UNPACK_FILES = f"""{_PRELUDE}
d=$(mktemp -d) && trap 'rm -rf "$d"' EXIT && tar -xof "$1" -C "$d" || exit
shift; n=0
for f; do
  whole "$f"; [ ! -d "$p" ] || fail {INVALID} "path $p is a folder"
  folder=${{p%/*}}; mkdir -p -- "${{folder:-/}}" && cat <"$d/$n" >"$p" || exit
  n=$((n + 1))
done
"""
"""Write the files 0, 1, … of the archive $1 to these paths, and make the folders above them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What is at a path. `mode` are its permission bits, which `permissions` shows as `ls -l` does.

    `changed_at` is in seconds since the epoch, `size` in bytes. A link is not followed: `target` says where it leads.
    """

    path: str
    kind: Literal["file", "folder", "link"]
    size: int
    mode: int
    permissions: str
    owner: str
    group: str
    changed_at: int
    target: str = ""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path)


def stopped_by(exit_code: int | None, cause: str, problem: str) -> str:
    """Return the cause by which a script did not run to its end; empty where it did, and its exit code says what is wrong with its files.

    A tool may be missing. Anything else that ends a script, or keeps it from starting a process, programs of the environment do or hold.
    """
    if exit_code is None or exit_code in _MISSING_TOOLS:
        return "sandbox_failed"
    return cause if exit_code >= _NOT_RUN or _NO_ROOM.search(problem) else ""


def shown(text: str) -> list[FileInfo]:
    """Return what `STAT`, `LIST`, `MAKE` or `MOVE` has shown, by path."""
    folder, entries, *links = text.split("\0")
    found = {info.path: info for info in _infos(folder, entries)}
    for path, target in zip(links[::2], links[1::2], strict=False):
        if (link := found.get(_joined(folder, path))) is not None:
            found[link.path] = replace(link, target=target)
    return [found[path] for path in sorted(found)]


def _infos(folder: str, entries: str) -> Iterator[FileInfo]:
    for entry in entries.split(_ENTRY)[1:]:
        bits, size, changed_at, owner, group, permissions, path = entry.removesuffix("\n").split(" ", 6)
        mode = int(bits, 16)
        yield FileInfo(
            path=_joined(folder, path),
            kind="folder" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "file",
            size=int(size),
            mode=stat.S_IMODE(mode),
            permissions=permissions,
            owner=owner,
            group=group,
            changed_at=int(changed_at),
        )


def _joined(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))
