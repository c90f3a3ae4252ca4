"""What an action gives back: its value, its degree of parallelism and where its time went."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tangram.ends import Fault, fault_of
from tangram.errors import TangramError

LEFT_OUT = "output is left out: it was longer than TANGRAM_OUTPUT_LIMIT_BYTES"
"""What shapes and classes say of a result that is `truncated`."""

FINISHED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What agents of mini-swe-agent print before a submission."""

_FIRST_LINE = 1000


class SubmissionCut(TangramError):
    """Raised when a submission is longer than results of commands can be: what is left of it must not be judged."""

    cause = "bad_input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Action completion time by part, in seconds: `queue_s + background_s + overhead_s + execution_s = total_s`.

    `queue_s` is the wait for resources in the scheduler, without any progress. `execution_s` is the action's own run. A command without
    cores of its own runs in the background, on idle time of the node. The time that it gets there is execution, and so is the time in
    which it sleeps by its own will. `background_s` is the time in which it wanted a core there and had none. `overhead_s` is all the rest
    from submission to result: messages, journal, applying the grant, restoring a model.
    """

    queue_s: float
    background_s: float = 0.0
    overhead_s: float
    execution_s: float

    @property
    def total_s(self) -> float:
        """Submission to result."""
        return self.queue_s + self.background_s + self.overhead_s + self.execution_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of a command in an environment.

    `status` is `succeeded` when the command ran to its end, whatever its `exit_code`; `timed_out` when it was
    killed at a timeout: then `exit_code` is None and the output is what had been printed so far.
    `cpu_s` are core-seconds used. `truncated` says that a stream was longer than `TANGRAM_OUTPUT_LIMIT_BYTES`: its beginning and its end
    are there, and a line says how much is left out between them. `cause` is a word of `tangram/ends.py`, such as
    `exit`, `timeout` or `out_of_memory`; it is empty where the command ended with exit code 0.
    """

    status: str
    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool
    dop: int
    act: Act
    reason: str = ""
    cause: str = ""
    cpu_s: float = 0.0
    max_rss_mb: float = 0.0

    @property
    def remark(self) -> str:
        """What a person should know of it that streams and exit code do not show: why it ended, and that output is left out."""
        return "; ".join(filter(None, (self.reason, LEFT_OUT if self.truncated else "")))

    @property
    def stderr_and_remark(self) -> str:
        """Its standard error, and the remark in brackets where there is one: for whoever is given no more than streams and exit code."""
        return f"{self.stderr}\n[{self.remark}]\n".lstrip() if self.remark else self.stderr

    def whole_submission(self) -> Self:
        """Return it, unless it is a submission of mini-swe-agent of which something is left out. Raises `SubmissionCut`."""
        first = self.stdout[:_FIRST_LINE].lstrip().partition("\n")[0].strip()
        if self.truncated and self.exit_code == 0 and first == FINISHED:
            raise SubmissionCut(f"the submission is not whole: {LEFT_OUT}")
        return self

    @property
    def fault(self) -> Fault:
        """Whose fault it is that the command did not end well; empty where it did."""
        return fault_of(self.cause)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of what a running command printed on a `stream`, `stdout` or `stderr`.

    `id` counts the bytes that were printed up to its end, on both streams; reading goes on after it. `dropped` bytes are missing before it:
    the result store was too slow for what was printed, or it keeps them no longer.
    """

    stream: str
    data: bytes
    id: str
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of an environment as they were, as an `image` on the node `node`; environments can be opened from it there."""

    image: str
    node: str


class Scores(list[float]):
    """Scores of a reward model, one per item, as a plain list that also carries `act` and `dop`."""

    act: Act
    dop: int


class Logprobs(list[list[float]]):
    """Log-probabilities of a teacher: for n token ids n-1 floats, a list per sequence; carries `act` and `dop`.

    Each list is an array of numpy where the token ids came as such (`like`).

    Where `top_k` was asked for, it also carries the following for each of these floats. Otherwise they are empty.
    """

    act: Act
    dop: int
    ranks: Sequence[Sequence[int]] = ()
    """By sequence and position: how many ids are more likely there than the given one, and 1."""
    top_ids: Sequence[Sequence[Sequence[int]]] = ()
    """By sequence and position: the `top_k` most likely ids, the most likely first; all ids where the vocabulary is smaller."""
    top_logprobs: Sequence[Sequence[Sequence[float]]] = ()
    """The log-probabilities of `top_ids`."""

    def like(self, token_ids: object) -> Self:
        """Return it, with an array of numpy for each sequence where the ids were one, or a list or tuple with some.

        Log-probabilities are then float32, ranks and ids int32; what is `top_k` by position has two dimensions.
        """
        numpy = sys.modules.get("numpy")
        given = token_ids if isinstance(token_ids, list | tuple) else (token_ids,)
        if numpy is not None and any(isinstance(one, numpy.ndarray) for one in given):
            self[:] = (numpy.array(values, numpy.float32) for values in self)
            self.ranks = [numpy.array(values, numpy.int32) for values in self.ranks]
            self.top_ids = [numpy.array(values, numpy.int32) for values in self.top_ids]
            self.top_logprobs = [numpy.array(values, numpy.float32) for values in self.top_logprobs]
        return self


class Texts(list[str]):
    """Generated texts, one per prompt; carries `act` and `dop`."""

    act: Act
    dop: int


class _WithBody:
    """What has the bytes of an HTTP answer."""

    __slots__ = ()
    body: bytes

    @property
    def text(self) -> str:
        """The body as UTF-8, undecodable bytes replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Parse the body as JSON. Raises `ValueError` where it is none."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer(_WithBody):
    """The answer of a server that runs in an environment, whatever its `status`; redirects are not followed.

    `headers` are pairs of names, in lower case, and values, as they came; `body` are the bytes as received, which may be compressed.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    act: Act
    dop: int = 1

    def header(self, name: str, default: str = "") -> str:
        """Return the first header of a name, in whatever case."""
        return next((value for known, value in self.headers if known == name.lower()), default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response(_WithBody):
    """The answer of an outside API. `body` are the bytes as received, at most the output cap."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    truncated: bool = False
    act: Act
