"""The canary: fixed questions whose answers show whether a restored engine holds the weights with which it was started.

Weights leave their devices and come back many times a day, and what comes back wrong computes plausible numbers. So an engine asks
itself these questions at the end of each start from its folder and keeps the answers. After each restore it asks them again before it
takes calls. If an answer differs, the restore fails (`WrongAnswer`) and the weights are thrown away. The start that follows must give the
answers of the start before. Beside a CUDA device it takes the same way from pinned memory as the restore that failed.

All layers of a model take part in each answer, so a spoilt layer shows. Of the token embedding only the rows that the questions name take
part, and of a mixture of experts only those to which they are routed. What is wrong only elsewhere there goes unnoticed.

How much answers may differ:

* By nothing, if the engine computes with the same bytes, by the same program, on a device of the same model. The questions are a batch of
  their own, so the shapes are always the same.
* By a part of the largest answer (`tolerance`), if the kernels may differ. The noise of a logit grows with its size and is about as large
  as the spacing of the dtype's numbers there. Other weights move log-probs by whole units.

A greedy continuation may take another token where two are almost equally likely, and what follows has another context. So
continuations are compared by the log-probs of their own tokens, up to the first place where the tokens differ. There the contexts are
still the same, and so the log-probs of the likeliest token must agree.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workers.gpu.errors import CallFailed, WrongAnswer

NEW_TOKENS = 4
"""Tokens by which a server of vLLM continues each question."""

# Shorter than a block of vLLM's prefix cache, which sleeping clears anyway: nothing is answered from there.
_QUESTIONS = ((1, 2, 3, 5, 8, 13, 21), (30, 4, 17, 9), (11, 29, 7, 26, 6, 19))

_TOLERANCES = {"float32": 1e-4, "float16": 1 / 256, "bfloat16": 1 / 32}
"""What answers may differ by, as a fraction of the largest: in the short dtypes four times the spacing of their numbers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answers to one question."""

    values: tuple[float, ...]
    """Its score, or the log-probs of its ids but the first and of the ids that continue it."""
    ids: tuple[int, ...] = ()
    """The ids that continue it greedily; none for a score."""


Answers = tuple[Answer, ...]
"""What one copy of a model answers, in the order of the questions."""


def questions(vocabulary: int, longest: int | None, new_tokens: int = 0) -> list[list[int]]:
    """Return the questions for a model of `vocabulary` ids that reads at most `longest` tokens (none: no bound), `new_tokens` included."""
    room = len(_QUESTIONS[0]) if longest is None else max(1, longest - new_tokens)
    return [[token % vocabulary for token in ids[:room]] for ids in _QUESTIONS]


def tolerance(dtype: str, before: Answers) -> float:
    """Return how much answers may differ that are computed in a dtype by other kernels; for an unknown dtype, the most."""
    largest = max((abs(value) for answer in before for value in answer.values), default=0.0)
    return _TOLERANCES.get(dtype, max(_TOLERANCES.values())) * max(1.0, largest)


def must_be_finite(answers: Answers) -> None:
    """Raise `CallFailed` for answers that no sound weights give."""
    for answer in answers:
        for value in answer.values:
            if not math.isfinite(value):
                raise CallFailed(f"the model answers a fixed question with {value}: its weights are of no use")


def must_agree(before: Answers, now: Answers, most: float) -> None:
    """Raise `WrongAnswer` where answers differ by more than `most` from those at the start; 0 allows no difference at all."""
    for question, (was, found) in enumerate(zip(before, now, strict=True)):
        if not most and was.ids != found.ids:
            raise WrongAnswer(f"fixed question {question} is continued with {list(found.ids)}, at the start with {list(was.ids)}")
        same = next((place for place, (one, other) in enumerate(zip(was.ids, found.ids, strict=True)) if one != other), len(was.ids))
        shared = len(was.values) - len(was.ids) + same + 1
        for one, other in zip(was.values[:shared], found.values[:shared], strict=True):
            # Written so that what is no number is wrong, too.
            if not abs(one - other) <= most:
                allowed = f"they may differ by {most:.2g}" if most else "they may not differ"
                raise WrongAnswer(f"fixed question {question} is answered with {other:.9g}, at the start with {one:.9g}; {allowed}")
