"""Which folders of the host programs on a PATH need, so that they run where nothing else of the host is seen.

| entry of PATH                    | folders                                                                            |
|----------------------------------|------------------------------------------------------------------------------------|
| `<prefix>/bin`, `<prefix>/sbin`  | itself; of the prefix `lib`, `lib64`, `libexec`, `include` and `pyvenv.cfg`         |
| `<tool>/shims` (pyenv and kin)   | all of `<tool>`                                                                    |
| any other                        | itself                                                                             |

A program in such a folder may be a link, such as the python of a virtual environment. The `bin` to which it leads counts as an entry
too. Homes, the sandbox's own folder and the folders above these are never shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

PROGRAM_FOLDERS = ("bin", "sbin")
PREFIX_ENTRIES = ("lib", "lib64", "libexec", "include", "pyvenv.cfg")
LINKS = 40


def path_of_commands() -> str:
    """Return the worker's own PATH, without the programs of the virtual environment that it runs in."""
    own = os.path.join(sys.prefix, "bin") if sys.prefix != sys.base_prefix else None
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if os.path.normpath(entry) != own) or os.defpath


def folders_of_programs(search_path: str, known: Sequence[str], private: Sequence[str], programs: Sequence[str]) -> tuple[str, ...]:
    """Return the folders to show, and the `programs` outside of these.

    What lies in a `known` folder is left out, and so is every folder that would show a `private` one.
    """
    waiting = [entry for entry in search_path.split(os.pathsep) if os.path.isabs(entry)]
    seen: set[str] = set()
    found: set[str] = set()
    while waiting:
        for folder in {os.path.normpath(waiting[0]), os.path.realpath(waiting.pop(0))} - seen:
            seen.add(folder)
            if os.path.isdir(folder):
                found.update(_installed_in(folder))
                waiting.extend(set(_linked(folder)))
    shown = sorted(path for path in found.union(programs) if not any(_is_in(secret, path) for secret in private))
    shown = [path for path in shown if not any(_is_in(path, folder) for folder in (private[0], *known))]
    return tuple(path for path in shown if not any(_is_in(path, other) for other in shown if other != path))


def _is_in(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(f"{folder}/")


def _installed_in(folder: str) -> Iterator[str]:
    prefix, name = os.path.split(folder)
    if name == "shims":
        yield prefix
        return
    yield folder
    if name in PROGRAM_FOLDERS:
        yield from (path for entry in PREFIX_ENTRIES if os.path.exists(path := os.path.join(prefix, entry)))


def _linked(folder: str) -> Iterator[str]:
    """Yield the program folders that links in `folder` lead to, by each step on their way."""
    try:
        links = [entry.path for entry in os.scandir(folder) if entry.is_symlink()]
    except OSError:
        return
    for path in links:
        for _ in range(LINKS):
            if not os.path.islink(path):
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
            if os.path.basename(os.path.dirname(path)) in PROGRAM_FOLDERS:
                yield os.path.dirname(path)
