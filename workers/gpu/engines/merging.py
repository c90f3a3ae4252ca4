"""Merges calls that wait for a device into one padded batch.

Calls come in threads of their own. One thread at a time has the device, for one *round*. Calls that arrive during a round wait and share
the next rounds. A call that finds the device free is computed at once.

1. Calls are served in the order in which they came. A round takes their inputs in that order up to its bound, at least one input. No
   call overtakes one that still has inputs left.
2. The first call in line leads the round, in its own thread. So there is no worker thread to start, to stop or to lose.
3. Inputs are checked before they come here. If a round fails all the same, it is repeated call by call, so that only the call at fault
   fails.
4. A cancelled call leaves at once, a leader after its round. Its inputs in the current round are computed and thrown away.

The answers to a call do not depend on the calls that it was merged with, except for the last bits, which differ with the shape of a batch.

| from | to | when |
|---|---|---|
| – | waiting | it has come |
| waiting | in a round | it is taken, alone or with others |
| in a round | waiting | the round is over, and it has inputs left |
| in a round | answered | the round is over, all its inputs have answers |
| in a round | failed | its part broke the computation, or the leader was interrupted |
| waiting, in a round | cancelled | its control says so |
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from workers.gpu.call_control import CallControl

S = TypeVar("S")
T = TypeVar("T")

_LOOK_FOR_CANCEL_S = 0.1


@dataclass(slots=True, eq=False)
class _Call(Generic[S, T]):
    """One call: its inputs, the indices that no round has taken yet, and what is known of its outcome."""

    inputs: Sequence[S]
    control: CallControl
    left: deque[int]
    answers: dict[int, T] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether its outcome is known."""
        return self.error is not None or len(self.answers) == len(self.inputs)

    @property
    def counts(self) -> bool:
        """Whether it is in line; one that is cancelled is not, even before its thread has seen it."""
        return not self.over and not self.control.cancelled.is_set()


class Merger(Generic[S, T]):
    """Merges calls of one kind. Safe for many threads."""

    def __init__(self, work: Callable[[list[S]], list[T]], size: Callable[[S], int], bound: Callable[[], int]) -> None:
        """Merge calls of `work`, which answers a list of inputs in their order and is never called twice at a time.

        The sizes of a round's inputs add up to `bound()` at most, unless a single input is larger.
        """
        self._work, self._size, self._bound = work, size, bound
        self._calls: list[_Call[S, T]] = []
        self._busy = False
        self._changed = threading.Condition()

    def ask(self, inputs: Sequence[S], control: CallControl) -> list[T]:
        """Return the answers of inputs, in their order. Raises `CallCancelled`, or what `work` raises for these inputs."""
        # Inputs of like size go together, which saves padding.
        order = sorted(range(len(inputs)), key=lambda index: -self._size(inputs[index]))
        call: _Call[S, T] = _Call(inputs, control, deque(order))
        with self._changed:
            self._calls.append(call)
        try:
            while self._leads(call):
                self._round()
        finally:
            with self._changed:
                self._calls.remove(call)
                self._changed.notify_all()
        if call.error is not None:
            raise call.error
        return [call.answers[index] for index in range(len(inputs))]

    def _leads(self, call: _Call[S, T]) -> bool:
        """Wait until the call is over (False), or it is first in line and the device is free (True, and it is taken)."""
        with self._changed:
            while not call.over:
                call.control.check()
                if not self._busy and next((other for other in self._calls if other.counts), None) is call:
                    self._busy = True
                    return True
                self._changed.wait(_LOOK_FOR_CANCEL_S)
            return False

    def _round(self) -> None:
        """Compute what waits, up to the bound, and free the device."""
        parts: list[tuple[_Call[S, T], list[int]]] = []
        try:
            with self._changed:
                parts = self._taken()
            self._compute(parts)
        finally:
            with self._changed:
                for call, taken in parts:
                    if call.error is None and any(index not in call.answers for index in taken):
                        call.error = RuntimeError("the round of the call was broken off")
                self._busy = False
                self._changed.notify_all()

    def _taken(self) -> list[tuple[_Call[S, T], list[int]]]:
        """Take inputs in the order of their calls; the caller holds the lock."""
        parts: list[tuple[_Call[S, T], list[int]]] = []
        room = self._bound()
        for call in self._calls:
            if not call.counts:
                continue
            taken: list[int] = []
            while call.left and ((size := self._size(call.inputs[call.left[0]])) <= room or not (parts or taken)):
                taken.append(call.left.popleft())
                room -= size
            if taken:
                parts.append((call, taken))
            if call.left:
                break
        return parts

    def _compute(self, parts: Sequence[tuple[_Call[S, T], list[int]]]) -> None:
        """Answer the parts of calls together; if that breaks, one by one."""
        try:
            answers = iter(self._work([call.inputs[index] for call, taken in parts for index in taken]))
        except Exception as error:
            if len(parts) == 1:
                parts[0][0].error = error
                return
        else:
            for call, taken in parts:
                call.answers.update(zip(taken, answers, strict=False))
            return
        # Not within the handler: it would keep the error alive, with the tensors in its frames.
        for part in parts:
            self._compute([part])
