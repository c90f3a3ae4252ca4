"""What the sync and the async client share: one client's connections and what it has opened.

| state | from | to |
|---|---|---|
| starting | `start` | open, once broker and result store have answered; else `StackUnreachable` |
| open | | submits, cancels, remembers environments |
| closing | `begin_closing` | asks for the end of all its environments; takes no other work |
| closed | `stop` | what still waits ends with `ClientClosed` |

Nothing here blocks, except `stop`, which waits for two threads. A session belongs to the process that made it.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from redis import Redis

from tangram import calls, clock
from tangram.action import Action, check_name
from tangram.blobs import Blobs
from tangram.connection import Link, find_link
from tangram.ends import CLOSED_ANYWAY
from tangram.errors import ActionFailed, ClientClosed, InvalidAction, StackUnreachable
from tangram.feed import Feed
from tangram.handles import Handle
from tangram.inbox import Inbox
from tangram.input_messages import InputMessages, What
from tangram.publisher import ControlRequest, Publisher, Submission
from tangram.settings import Settings
from tangram.shards import Loads, shard_of, shard_of_action
from tangram.streams import OutputReader
from tangram.tracing import ActionSpan, tracer_of

CLOSE_WAIT_S = 10.0
"""How long leaving a client's context waits for its environments to be gone."""

_START_SLACK_S = 0.5
_STOP_WAIT_S = 5.0


class Session:
    """The core of one client; safe for use by many threads."""

    def __init__(self, job: str, settings: Settings | None = None, *, client_id: str | None = None, link: Link | None = None) -> None:
        """Find the stack, unless there is a `link` to one; `start` connects to it.

        Several processes may share a `client_id`: each gets the results of all, and the client is gone once all of them are. Raises
        `InvalidAction` when `job` or `client_id` is no valid name; `StackUnreachable` when there is no stack to connect to; `TangramError`
        when spans are asked for and OpenTelemetry is not installed.
        """
        Action.from_header({"kind": "check", "job": job, "client": client_id or ""})
        if not isinstance(settings, Settings | None):
            raise InvalidAction("settings", f"must be Settings(broker_url=…, result_url=…), not {type(settings).__name__}")
        settings = settings or Settings()
        link = link or find_link(settings)
        self.job = job
        self._tracer = tracer_of(settings, "tangram-client")
        self.start_limit_s = settings.connect_timeout_s + _START_SLACK_S
        self.client_id = client_id or secrets.token_hex(8)
        self._ids = (f"{self.client_id}-{n:08x}" for n in itertools.count(1))
        if client_id is not None:  # others count under the same id
            self._ids = (f"{client_id}-{secrets.token_hex(8)}" for _ in itertools.count())
        self._pid = os.getpid()
        self._lock = clock.lock()
        self._closed = False
        self._environments: dict[str, calls.Place] = {}
        self._input = InputMessages(self.client_id, job)
        self._store = link.store
        self.streams = OutputReader(self._store, settings.connect_timeout_s, settings.outage_s)
        """What reads the output of commands, also of those that another process has submitted."""
        self.loads = Loads(settings.shards)
        """What the shards of the stack carry, where it has several."""
        self._inbox = Inbox(Blobs(self._store, patience_s=settings.outage_s))
        self._publisher = Publisher(link.app, self._store, self._inbox, self.client_id, settings)
        self._feed = Feed(self._store, self._inbox, self.client_id, self.loads, link.store_name, settings)
        # Also runs at interpreter exit: what a forgotten client still holds back is sent, its threads end.
        self._finalizer = weakref.finalize(self, _shut_down, self._publisher, self._feed, self._inbox, self.streams, self._store, self._pid)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, for what holds a session: clients, environments, handles."""
        raise TypeError("a client stays in its process: make a Client in each one, and reach an environment by client.environment(ID)")

    def start(self) -> list[Future[None]]:
        """Begin to connect; return what becomes done when broker and result store have answered."""
        self._feed.start()
        self._publisher.start()
        return [self._publisher.ready, self._feed.ready]

    def check_started(self) -> None:
        """Give up what has not connected by now. Raises `StackUnreachable`, saying which part it was."""
        for part, ready in (("broker", self._publisher.ready), ("result store", self._feed.ready)):
            problem = ready.exception() if ready.done() else StackUnreachable(f"the {part} gave no answer in {self.start_limit_s:g} s")
            if problem is not None:
                self.stop(0.0)
                raise problem

    @property
    def in_use(self) -> bool:
        """Whether an action has no result yet, or the output of a command is read."""
        return bool(self._inbox.waiting()) or self.streams.in_use

    def submit(self, action: Action, task_id: str | None = None, *, is_new: bool = False) -> Handle[Any]:
        """Send `action` on its way and return a handle on it. An action that names no job gets that of the client.

        With a `task_id`, the action runs once however often it is submitted, by any process with this client id. The handle is on what
        was submitted first. A `task_id` must begin with the client's id and a hyphen. Results are kept for `tangram.wire.RESULT_TTL_S`.
        Whoever knows that the id `is_new` spares the store the question whether it has a result. Raises `InvalidAction` for an id that is
        no valid name: under half of a surrogate pair nothing can be asked of the store.
        """
        if not isinstance(action, Action):
            raise InvalidAction("action", f"must be an Action, not {type(action).__name__}")
        if task_id is not None:
            check_name("task_id", task_id)
        with self._lock:
            self._check_open()
            if action.kind == "cpu.close" and action.environment:
                self._environments.pop(action.environment, None)
            return self._submit(action, task_id, is_new=is_new)

    def is_with_broker(self, task_id: str) -> bool:
        """Return whether the broker has an action that waits for its result."""
        return self._inbox.is_with_broker(task_id)

    def put_aside(self, action: Action) -> Action:
        """Put what is large among an action's arguments into the result store, and return the action with references in place of it.

        Sending does so anyway, but one action after another. Blocks for as long as that takes, so call it from a thread of your own. Raises
        `StackUnreachable` when the result store cannot be reached; `InvalidAction` when an argument cannot be sent.
        """
        try:
            return action.with_arguments(**self._publisher.pack(action))
        except (TypeError, ValueError) as error:
            raise InvalidAction("arguments", f"cannot be sent as JSON: {error}") from error

    def open_environment(self, action: Action) -> Handle[Any]:
        """Submit a `cpu.open` whose environment is closed with the client, unless it is detached or could not be opened."""
        place = calls.place_of(action)
        if not action.owner:
            action = replace(action, owner=f"{socket.gethostname()[:200]}:{os.getpid()}")
        with self._lock:
            self._check_open()
            if not action.detached:
                self._environments[place.environment] = place
            handle = self._submit(action)
        handle.when_done(lambda failed: self._forget(place) if failed else None)
        return handle

    def cancel(self, trajectory: str | None, job: str | None) -> ControlRequest:
        """Cancel everything of one trajectory, or of a whole job; `wait_for` what this returns.

        Raises `InvalidAction` unless one is named.
        """
        if (trajectory is None) == (job is None):
            raise InvalidAction("cancel", "name either a trajectory or a job")
        check_name("cancel", job if trajectory is None else trajectory)
        of = self.job if job is None else job
        what: dict[str, Any] = {"job": of} if trajectory is None else {"trajectory": trajectory, "job": of}
        with self._lock:
            self._check_open()
            for environment, place in tuple(self._environments.items()):
                if place.job == of and trajectory in (None, place.trajectory):
                    del self._environments[environment]
            # Submissions come by another queue: the scheduler may not have read them yet, and knows by their ids that they are cancelled.
            if ids := self._inbox.waiting_of(of, trajectory):
                what["ids"] = ids
            for task_id in ids:
                self._note_cancel(task_id)
            control = ControlRequest({"cancel": what})
            self._publisher.send(control)
            return control

    def wait_for(self, control: ControlRequest) -> None:
        """Return once the broker knows. Raises `StackUnreachable`."""
        self._publisher.wait_for(control)

    def renew_lease(self, place: calls.Place, lease_s: float) -> ControlRequest:
        """Have the lease of an environment end `lease_s` seconds from now; `wait_for` what this returns. Raises `ClientClosed`."""
        shard = shard_of(place.environment, self.loads.shards)
        return self._control({"renew": {"environment": place.environment, "job": place.job, "lease_s": lease_s}}, shard)

    def drain(self, node: str, *, draining: bool) -> ControlRequest:
        """Have a node drained, or be so no more; `wait_for` what this returns. Raises `ClientClosed`."""
        return self._control({"drain": {"node": node, "draining": draining}})

    def _control(self, words: dict[str, Any], shard: int | None = None) -> ControlRequest:
        with self._lock:
            self._check_open()
            control = ControlRequest(words, shard=shard)
            self._publisher.send(control)
            return control

    def cancel_task(self, task_id: str) -> ControlRequest:
        """Ask for the end of one action, which fails if that cannot be sent; `wait_for` what this returns.

        Once the client is closed nothing is sent, and waiting raises `ClientClosed`.
        """
        control = ControlRequest({"cancel": {"ids": [task_id]}}, (task_id,), shard=self._inbox.shard_of(task_id))
        if self._closed:
            control.sent.set_exception(ClientClosed("the client is closed: open another one"))
        else:
            self._note_cancel(task_id)
            self._publisher.send(control)
        return control

    def _note_cancel(self, task_id: str) -> None:
        """Have a task cancelled again whenever it is submitted again."""
        publisher, shard = self._publisher, self._inbox.shard_of(task_id)  # a task that waits must not keep a forgotten session alive
        self._inbox.note_cancel(task_id, lambda: publisher.send(ControlRequest({"cancel": {"ids": [task_id]}}, shard=shard)))

    def give(self, task_id: str, what: What) -> ControlRequest:
        """Give a running command something (`tangram.input_messages`); `wait_for` what this returns. Raises `ClientClosed`."""
        with self._lock:
            self._check_open()
            control = ControlRequest(self._input.message(task_id, what), shard=self._inbox.shard_of(task_id))
            self._publisher.send(control)
            return control

    def begin_closing(self) -> list[Future[Any]]:
        """Take no more work and ask for the end of all open environments; return what is done with it. Idempotent."""
        with self._lock:
            if self._closed:
                return []
            self._closed = True
            places = list(self._environments.values())
            if self._pid != os.getpid():
                return []
            return [self._submit(calls.close_environment(place)).future for place in places]

    def has_closed(self, environment: str) -> bool:
        """Return whether closing this client has closed an environment."""
        return self._closed and environment in self._environments and self._pid == os.getpid()

    def stop(self, wait_s: float = _STOP_WAIT_S) -> None:
        """Send what is still to be sent, end both threads, and end what waits. Idempotent."""
        with self._lock:
            self._closed = True
        if self._finalizer.detach():
            _shut_down(self._publisher, self._feed, self._inbox, self.streams, self._store, self._pid, wait_s)

    def _submit(self, action: Action, task_id: str | None = None, *, is_new: bool = False) -> Handle[Any]:
        if not action.job:
            action = replace(action, job=self.job)
        future = self._inbox.waiting_for(task_id) if task_id is not None else None
        if future is not None and task_id is not None:
            return Handle(task_id, future, self, action)
        new_id = task_id or next(self._ids)
        shard = shard_of_action(new_id, action, self.loads.shards)
        submission = Submission(new_id, action, shard, once=task_id is not None and not is_new)
        if self._tracer is not None:
            submission.span = ActionSpan(self._tracer, submission.task_id, action)
        publisher, ids = self._publisher, self._ids  # a task that waits must not keep a forgotten session alive
        future = self._inbox.expect(
            submission.task_id,
            action.kind,
            submission.span,
            again=task_id is not None,
            send_again=lambda: publisher.send(submission.repeated()),
            # What has an id of the caller's may be wanted by others.
            withdraw=(lambda: _withdraw(publisher, submission, ids)) if task_id is None else None,
            group=(action.job, action.trajectory),
            shard=shard,
        )
        self._publisher.send(submission)
        return Handle(submission.task_id, future, self, action)

    def _forget(self, place: calls.Place) -> None:
        with self._lock:
            self._environments.pop(place.environment, None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("the client is closed: open another one")
        if self._pid != os.getpid():
            raise ClientClosed(f"the client belongs to process {self._pid}: open one in each process after forking")


class OpenEnvironment:
    """What the environments of both clients share: which one it is."""

    def __init__(self, session: Session, place: calls.Place) -> None:
        """Stand for an environment that is open; `open` of a client makes these."""
        self._session = session
        self._place = place
        self._closed = False

    @property
    def id(self) -> str:
        """The environment's id."""
        return self._place.environment

    @property
    def trajectory(self) -> str:
        """The trajectory that owns it."""
        return self._place.trajectory

    @contextmanager
    def _unless_closed_anyway(self) -> Iterator[None]:
        """Pass over the failure of a close whose environment something else has closed, such as its client."""
        try:
            yield
        except ActionFailed as error:
            if error.cause not in CLOSED_ANYWAY:
                raise
        except ClientClosed:
            if not self._session.has_closed(self.id):
                raise


def _withdraw(publisher: Publisher, submission: Submission, ids: Iterator[str]) -> None:
    """Have an action that was given up not be done after all, as soon as the broker is back; have a close be done."""
    action = submission.action
    if action.kind == "cpu.close":
        publisher.send(replace(submission, span=None, lasting=True))
        return
    publisher.send(ControlRequest({"cancel": {"ids": [submission.task_id]}}, lasting=True, shard=submission.shard))
    if action.kind == "cpu.open":
        publisher.send(Submission(next(ids), calls.close_environment(calls.place_of(action)), submission.shard, lasting=True))


def _shut_down(
    publisher: Publisher, feed: Feed, inbox: Inbox, streams: OutputReader, store: Redis, pid: int, wait_s: float = _STOP_WAIT_S
) -> None:
    """End the threads and connections of a session, in the process that made it."""
    if pid != os.getpid():
        return
    publisher.stop(wait_s)
    feed.stop(wait_s)
    inbox.fail_all(lambda: ClientClosed("the client was closed before the action had a result"))
    streams.close(lambda: ClientClosed("the client was closed before the command had ended"))
    inbox.close()
    store.connection_pool.disconnect()
