"""A module for `--include`: makes a stub engine answer its canary otherwise once, some restores after its start, as a broken model does."""

from __future__ import annotations

from workers.gpu.engines.canary import Answer, Answers
from workers.gpu.engines.stub import StubEngine

AFTER = 6
_right = StubEngine._canary
_asked: dict[str, int] = {}


def _canary(self: StubEngine) -> list[Answers]:
    answers = _right(self)
    _asked[self.name] = _asked.get(self.name, 0) + 1
    if self.name == "judge" and _asked[self.name] == AFTER + 1:
        return [tuple(Answer(tuple(value + 1.0 for value in one.values)) for one in answers[0])]
    return answers


StubEngine._canary = _canary  # type: ignore[method-assign]
