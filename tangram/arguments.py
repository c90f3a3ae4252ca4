"""Checks of what a trainer gives a call, shared by the calls of `tangram.calls`. Each raises `InvalidAction`, which names the argument."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from tangram.elasticity import shown
from tangram.errors import ArgumentsTooLong, InvalidAction

UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""What no shell can be given: NUL, and halves of surrogate pairs, which have no UTF-8 form. Models write both."""

MOST_WORD_BYTES = 128 * 1024 - 1
"""Longest argument or variable that Linux hands to a program, of which the name, `=` and the final NUL are part."""

LONGEST_PATH = 8192
"""Characters of a path that is sent to a node. Linux takes 4096 bytes, and the node says which path has more."""

MOST_WORDS_BYTES = 1_920 * 1024
"""Most that all arguments and variables of a program may take together; Linux allows 2 MiB with the usual limit on stacks."""

_WORD_COSTS = 9
_SHELLS = frozenset(("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh", "busybox"))
_TEXT_FOLLOWS = re.compile("-[A-Za-z]*c")


F = TypeVar("F", bound=Callable[..., Any])

AnyPath = str | os.PathLike[str]


def takes(options: type) -> Callable[[F], F]:
    """Have a method refuse, as Python does, what is no option of the `TypedDict`, and name itself and the nearest option."""

    def decorate(method: F) -> F:
        known = {*inspect.signature(method).parameters, *options.__annotations__}

        @functools.wraps(method)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    nearest = difflib.get_close_matches(name, known, 1)
                    hint = f": did you mean {nearest[0]}?" if nearest else ""
                    raise TypeError(f"{method.__qualname__}() has no option {name!r}{hint}")
            return method(*args, **given)

        return cast(F, checked)

    return decorate


def present(**arguments: Any) -> dict[str, Any]:
    """Leave out what was not given."""
    return {name: value for name, value in arguments.items() if value is not None}


def listed(name: str, values: Iterable[Any]) -> list[Any]:
    """Return a list of the values of whatever can be iterated over, but for texts and mappings."""
    return list(iterable(name, values))


def iterable(name: str, values: Iterable[Any]) -> Iterable[Any]:
    """Return values that can be iterated over and are neither a text nor a mapping."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidAction(name, f"must be a list, not {type(values).__name__}")
    return values


def whole_number(name: str, value: object, most: int) -> int:
    """Return a whole number from 0 to `most`; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InvalidAction(name, f"must be a whole number from 0 to {most}, not {value!r:.40}")
    return value


def truth(name: str, value: object) -> bool:
    """Return a truth value; numbers and texts are none."""
    if not isinstance(value, bool):
        raise InvalidAction(name, f"must be true or false, not {shown(value)}")
    return value


def process_variables(variables: Mapping[str, str] | None, env: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """Return variables for the environment of a process, given by one of two words; none where there are none."""
    word, given = ("variables", variables) if env is None else ("env", env)
    if env is not None and variables is not None:
        raise InvalidAction("env", "is another word for variables: give one of them")
    if given is not None and not isinstance(given, Mapping):
        raise InvalidAction(word, f"must be texts by name, not {given!r:.200}")
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name or UNWRITABLE.search(name + value):
            raise InvalidAction(word, f"must be names and texts, not {name!r:.200}: {value!r:.200}")
    _check_sizes(word, [f"{name}={value}" for name, value in (given or {}).items()])
    return dict(given) if given else None


def program_words(interpreter: Sequence[AnyPath] | None, command: str) -> list[str] | None:
    """Return the program and its arguments that `command` is the last of; none where it is a text for a session's shell."""
    if not isinstance(command, str) or not (interpreter or command.strip()):
        raise InvalidAction("command", "must be a command line")
    if bad := UNWRITABLE.search(command):
        raise InvalidAction("command", f"has {bad[0]!r} at character {bad.start()}, which no program can be given")
    if interpreter is None:
        return None
    words = [*(os.fspath(word) if isinstance(word, os.PathLike) else word for word in iterable("interpreter", interpreter)), command]
    if not all(isinstance(word, str) and not UNWRITABLE.search(word) for word in words) or not words[0]:
        raise InvalidAction("interpreter", "must be the name of a program and arguments")
    text = script_place(words)
    _check_sizes("command", [word for place, word in enumerate(words) if place != text])
    return words


def script_place(words: Sequence[str]) -> int | None:
    """Return which word is the text of a shell (`bash -lc TEXT`) that is too long for an argument, so that it is handed over as a file."""
    shells = [place for place, word in enumerate(words) if word.rpartition("/")[2] in _SHELLS]
    for place in range(shells[0] + 2 if shells else len(words), len(words)):
        if _TEXT_FOLLOWS.fullmatch(words[place - 1]) and len(words[place].encode()) > MOST_WORD_BYTES:
            return place
    return None


def folder_path(name: str, path: AnyPath | None) -> str | None:
    """Return the path of a folder; none where none was given."""
    return None if path is None or path == "" else path_text(name, path)


def path_text(name: str, path: AnyPath, unwritable: re.Pattern[str] = UNWRITABLE) -> str:
    """Return the text of a path; it has no `unwritable` character."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not 0 < len(text) <= LONGEST_PATH or unwritable.search(text):
        raise InvalidAction(name, f"must be a path, not {path!r:.200}")
    return text


def content(name: str, data: object) -> bytes:
    """Return the bytes of a file that is to be written, or of a request; text as UTF-8."""
    try:
        data = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError as error:
        raise InvalidAction(name, f"must have a UTF-8 form: {error}") from None
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidAction(name, f"must be bytes or text, not {type(data).__name__}")
    return bytes(data)


def _check_sizes(name: str, words: Sequence[str]) -> None:
    sizes = [len(word.encode("utf-8", "surrogateescape")) for word in words]
    if max(sizes, default=0) > MOST_WORD_BYTES:
        raise ArgumentsTooLong(name, f"Linux hands programs at most {MOST_WORD_BYTES} bytes in one argument or variable, not {max(sizes)}")
    if (total := sum(sizes) + _WORD_COSTS * len(sizes)) > MOST_WORDS_BYTES:
        raise ArgumentsTooLong(name, f"programs are handed at most {MOST_WORDS_BYTES} bytes in all arguments or variables, not {total}")


def request_body(body: bytes | str | None, json_body: Any, headers: dict[str, str]) -> bytes | None:
    """Return the bytes of a request; a JSON body also sets the content type."""
    if json_body is None:
        return None if body is None else content("body", body)
    if body is not None:
        raise InvalidAction("body", "give either body or json, not both")
    if not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "application/json"
    try:
        return json.dumps(json_body).encode()
    except (TypeError, ValueError) as error:
        raise InvalidAction("json", str(error)) from None
