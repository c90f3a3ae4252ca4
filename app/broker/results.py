"""Celery's result backends with one more rule: the first end of an action stays.

Workers and scheduler store ends through these. Which of two comes first, the store decides, since nobody else sees both:

| stored so far | what is offered | then |
|---|---|---|
| nothing, or no end | anything, by a try that counts | it is stored, and published under its key |
| nothing, or no end | anything, by a try whose claim the scheduler has disowned | it is refused |
| an end, or what nobody can read | the same once more, since an answer got lost | it stands already |
| an end, or what nobody can read | anything else | it is refused |

So what a client was told stays true. The call of a refused try is marked, and its node reports that it does not know the end.

Where the broker is the store, the report of the end is sent at the same moment: both are there, or neither. It says again when a request
went out, since the node's own report of that may still be on its way, and counts only before the end.

A result counts once it is stored. While the store is away, or answers with errors, the result waits in its thread, until the node leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from celery.backends.base import KeyValueStoreBackend
from celery.backends.redis import RedisBackend
from kombu.utils.functional import retry_over_time
from redis import BlockingConnectionPool, RedisError

from app.action_task import Call, NodeRuntime
from app.broker.messages import reports_message
from app.runtime import runtime
from tangram.connection import KEEPALIVE, LEAVE_REPLICAS
from tangram.decode import read_meta
from tangram.errors import ActionError
from tangram.wire import DISOWNED, ENDED_CLAIM_TTL_S, GRANT_HEADER, claim_key

log = logging.getLogger(__name__)

CONNECTIONS = 32
"""Connections of one process for results. A worker's threads may be more: calls of a service end together."""

RETRIES = {"interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}
"""How a worker goes on trying to store a result: for as long as it takes."""

# KEYS: the result's key, the claim of its try, and the queue of reports.
# ARGV: the result; the seconds that it lasts; what a disowned claim says; the seconds that the claim lasts from now on, or 0 for no change;
# a message for the queue, or nothing.
# `may_stand` is the same rule for the memory of a process.
_OFFER = """
local stored = redis.call('GET', KEYS[1])
if stored == ARGV[1] then return 1 end
if stored then
  local read, meta = pcall(cjson.decode, stored)
  if not read or type(meta) ~= 'table' or type(meta.status) ~= 'string' then return 0 end
  if meta.status == 'SUCCESS' or meta.status == 'FAILURE' or meta.status == 'REVOKED' then return 0 end
end
if redis.call('GET', KEYS[2]) == ARGV[3] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('PUBLISH', KEYS[1], ARGV[1])
if ARGV[4] ~= '0' then redis.call('EXPIRE', KEYS[2], ARGV[4]) end
if ARGV[5] ~= '' then redis.call('LPUSH', KEYS[3], ARGV[5]) end
return 1
"""


def may_stand(stored: bytes | None, offered: bytes, claim: bytes | None) -> bool:
    """Return whether a result may stand where `stored` is, with what the claim of its try says now."""
    if stored == offered:
        return True
    try:
        if stored is not None and read_meta(stored).final:
            return False
    except ActionError:
        return False
    return claim != DISOWNED.encode()


class FirstEndStays(KeyValueStoreBackend):  # type: ignore[misc]
    """What the backends share. They say in `_offer` how a result is stored."""

    has_broker = False
    """Whether the broker is the store."""

    def _offer(self, key: str, result: bytes, claim: str, final: bool, queue: str, message: bytes) -> bool:
        """Store and publish a result if it may stand; return whether it stands. The claim of a final one lasts `ENDED_CLAIM_TTL_S`.

        A `message`, if there is one, is put into the `queue` of reports when the result is stored.
        """
        raise NotImplementedError

    def _store_result(self, task_id: str, result: Any, state: str, traceback: str | None = None, request: Any = None, **_: Any) -> Any:
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        encoded = self.encode({**meta, "task_id": task_id})
        grant = getattr(request, GRANT_HEADER, None) or {}
        claim = claim_key(task_id, grant.get("attempt", 0))
        call: Call | None = getattr(request, "tangram_call", None)
        final = state in self.READY_STATES
        queue, message = "", b""
        if call is not None and final and self.has_broker:
            queue, message = call.events_queue, reports_message([*call.sent_report(), call.report()], call.events_queue)
        offered = (self.get_key_for_task(task_id).decode(), encoded.encode(), claim, final, queue, message)
        policy = self.app.conf.result_backend_transport_options.get("retry_policy", RETRIES)
        if call is not None:
            call.unstored = True
        stands = retry_over_time(self._offer, (RedisError, OSError), offered, errback=_complain, **policy)
        if not stands:
            # A scheduler offers one when somebody asks again for an action that has ended.
            level = logging.INFO if call is None else logging.WARNING
            log.log(level, "the result of action %s is refused: another one stands, or its try was given up", task_id)
        if call is not None:
            call.unstored, call.refused, call.end_is_told = False, not stands, stands and message != b""
        return result


class RedisResults(FirstEndStays, RedisBackend):  # type: ignore[misc]
    """Celery's result backend on Redis."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # redis-py's usual pool refuses the 101st of as many threads, as if the store were away; with this one it waits its turn.
        super().__init__(*args, connection_pool=BlockingConnectionPool, max_connections=CONNECTIONS, **kwargs)
        self.connparams.update(LEAVE_REPLICAS, timeout=self.connparams["socket_timeout"])
        if "path" not in self.connparams:  # not over a Unix socket
            self.connparams.update(KEEPALIVE)

    def on_task_call(self, *args: Any, **kwargs: Any) -> None:
        """Subscribe to nothing yet: whoever waits for a result does so then, and a scheduler that sends a callback never does."""

    @cached_property
    def _script(self) -> Any:
        return self.client.register_script(_OFFER)

    @cached_property
    def has_broker(self) -> bool:  # type: ignore[override]
        """Whether the broker is the store: both have the same address."""
        return bool(self.app.conf.result_backend == self.app.conf.broker_url)

    def _offer(self, key: str, result: bytes, claim: str, final: bool, queue: str, message: bytes) -> bool:
        args = [result, self.expires, DISOWNED, ENDED_CLAIM_TTL_S if final else 0, message]
        return bool(self._script(keys=[key, claim, queue], args=args))


def _complain(error: Exception, pauses: Iterator[float], retries: int) -> float:
    """Say once that a store is away, and return the pause before the next try. A node that leaves raises the error."""
    node = runtime().part(NodeRuntime)  # type: ignore[type-abstract]
    if node is not None and node.has_left:
        raise error
    if retries == 0:
        log.warning("the result store is away, a result waits for it: %s", error)
    return next(pauses)
