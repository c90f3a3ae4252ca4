"""Calls back with what a command prints while it runs: `on_stdout` and `on_stderr` of `exec`.

The callbacks get text as it comes, not lines. A character whose bytes come in two chunks is given once it is whole. If a callback raises an
error, the command is cancelled, and the error is raised.
"""

from __future__ import annotations

import codecs
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from tangram.handles import AsyncHandle, Handle
from tangram.results import Chunk, ExecResult

OnText = Callable[[str], Any]
"""Gets a piece of what a command prints. The async client awaits what it returns, if that can be awaited."""


class _Callbacks:
    def __init__(self, on_stdout: OnText | None, on_stderr: OnText | None) -> None:
        given = {"stdout": on_stdout, "stderr": on_stderr}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._calls = {name: (call, decoder("replace")) for name, call in given.items() if call is not None}

    def answers(self, chunk: Chunk) -> Iterator[Any]:
        """Yield what the callback for a chunk returns, if there is one for it."""
        if chunk.stream in self._calls:
            call, decoder = self._calls[chunk.stream]
            if text := decoder.decode(chunk.data):
                yield call(text)

    def last_answers(self) -> Iterator[Any]:
        """Yield what the callbacks return for a character that was cut off."""
        for call, decoder in self._calls.values():
            if text := decoder.decode(b"", final=True):
                yield call(text)


def follow(handle: Handle[ExecResult], on_stdout: OnText | None, on_stderr: OnText | None) -> ExecResult:
    """Return the result of a command with `stream`, after telling the callbacks all that it has printed. Raises as `Handle.result`."""
    callbacks = _Callbacks(on_stdout, on_stderr)
    try:
        for chunk in handle.output():
            list(callbacks.answers(chunk))
        list(callbacks.last_answers())
        return handle.result()
    finally:
        handle.cancel()


async def follow_async(handle: AsyncHandle[ExecResult], on_stdout: OnText | None, on_stderr: OnText | None) -> ExecResult:
    """Do what `follow` does for coroutines."""
    callbacks = _Callbacks(on_stdout, on_stderr)
    try:
        async for chunk in handle.output():
            await _settle(callbacks.answers(chunk))
        await _settle(callbacks.last_answers())
        return await handle
    finally:
        await handle.cancel()


async def _settle(answers: Iterator[Any]) -> None:
    for answer in answers:
        if inspect.isawaitable(answer):
            await answer
