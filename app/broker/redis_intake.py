r"""Taking messages on Redis so that none is lost, whenever the scheduler is killed.

kombu's Redis transport pops a message and notes it as unacknowledged in a second command. If the process dies between the
two, the message is lost. Here the server *moves* a message from the queue to a list of taken messages, and the scheduler
removes it from that list when it acknowledges it. At each moment the message is in one of the two.

| key | type | holds |
|---|---|---|
| `<queue>`, `<queue>\x06\x16<priority>` | list | waiting messages as kombu writes them, the oldest at the right |
| `tangram-taken:<epoch>.<turn>:<queue>` | list | taken by the scheduler of that epoch, not acknowledged, the oldest at the right |
| `tangram-taken` | set | the names of all such lists |

The leading scheduler puts back what schedulers of other epochs have taken. It does so when it opens, and then every `RESCUE_S`: one of
the others may have slept through the end of its lease. Such a message may come twice; its task id shows it.

A scheduler that connects again takes the next `turn`, and puts back what the turns before have taken. The server may not know yet that
an earlier connection is dead, and then serves its blocking move first.

The intake waits with a blocking move on each queue, on a connection of its own. Where messages have come one by one lately, a message that
it has waited for is taken alone. Otherwise it waits for `PATIENCE_S`, and a script moves all other messages of all queues. Where the script
has found none lately, it is left out as long as all messages are waited for. The order of a queue is kept. A blocking move may have put a
message into a list before the script ran, whose answer has not been read yet. The list then holds one message more than were read. That
message is read first, even if it has to be waited for. A message that a blocking move brings after the script is left for the next time.

What is sent goes out together with the acknowledgements, in one transaction, before the next blocking move. So a message that comes alone
costs one round trip, whatever follows from it.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis import Connection, ConnectionPool, Redis, RedisError

from tangram.wire import of_shard

TAKEN = "tangram-taken"
RESCUE_S = 10.0
REMEMBERED_EPOCHS = 20
INTAKES_NAMED = 20
"""After so many intakes the names of the lists come again, so that a bad network does not make more and more of them."""
PRIORITY_STEPS = ("\x06\x163", "\x06\x166", "\x06\x169")
"""What kombu appends to the name of a queue for messages with a priority; ours have none, a stranger's may."""
_LOOK_S = 0.5

ONE_BY_ONE = 8
"""After so many takes in a row that brought one message, no others are expected beside the next one. After so many for which the script has
found nothing, it is expected to find nothing."""
PATIENCE_S = 0.001
"""How long more messages are waited for otherwise: commits cost the scheduler more than messages."""

# KEYS: a queue and where to move its messages, again and again; ARGV[1]: how many of each queue at most.
# Returns how many messages lay in each list before, then the messages, each after the name of its list.
_TAKE = """
local found = {}
for i = 2, #KEYS, 2 do found[#found + 1] = redis.call('LLEN', KEYS[i]) end
for i = 1, #KEYS, 2 do
  for _ = 1, tonumber(ARGV[1]) do
    local message = redis.call('LMOVE', KEYS[i], KEYS[i + 1], 'RIGHT', 'LEFT')
    if not message then break end
    found[#found + 1] = KEYS[i + 1]
    found[#found + 1] = message
  end
end
return found
"""

# KEYS: the set of lists; ARGV: the oldest epoch whose scheduler may still be asleep, and the lists that are in use.
# Puts what is in all other lists back where it came from, and forgets those of older epochs.
_RESCUE = """
local used = {}
for i = 2, #ARGV do used[ARGV[i]] = true end
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if not used[name] then
    local epoch, queue = string.match(name, '^[^:]*:([^:]*):(.*)$')
    while redis.call('LMOVE', name, queue, 'LEFT', 'RIGHT') do end
    if tonumber(epoch) < tonumber(ARGV[1]) then redis.call('SREM', KEYS[1], name) end
  end
end
"""

Taken = tuple[str, bytes]
"""Where a message lies now, and what it says; the ticket with which it is acknowledged."""


class RedisIntake:
    """Moves messages of `queues` to lists of the scheduler `epoch`. For one thread."""

    def __init__(self, pool: ConnectionPool, queues: Sequence[str], epoch: int, number: int = 0, shard: int = 0) -> None:
        """Connect, and take over what schedulers before this one, and earlier intakes of its own epoch, had taken and not acknowledged.

        `pool` sets a time limit for answers. `number` counts the intakes of the epoch. Each `shard` of schedulers has
        epochs and queues of its own.

        Raises what redis-py raises, here and in all methods; after that the object is to be closed.
        """
        self._pool = pool
        self._client: Redis = Redis(connection_pool=pool)
        self._names = of_shard(TAKEN, shard)
        self._lists = {queue: f"{self._names}:{epoch}.{number % INTAKES_NAMED}:{queue}" for queue in queues}
        self._take = self._client.register_script(_TAKE)
        self._rescue = self._client.register_script(_RESCUE)
        self._sources = [key for queue, taken in self._lists.items() for key in (queue, taken)]
        self._prioritised = [k for queue, taken in self._lists.items() for step in PRIORITY_STEPS for k in (queue + step, taken)]
        self._oldest = epoch - REMEMBERED_EPOCHS
        self._waiting: dict[str, Connection] = {}
        self._armed: set[str] = set()
        self._answered: set[str] = set()
        self._alone = self._in_vain = 0
        self._unacknowledged = dict.fromkeys(self._lists.values(), 0)
        self._next_look = self._next_rescue = 0.0
        self._put_back(())
        self._client.sadd(self._names, *self._lists.values())
        for queue in queues:
            # Between two messages may lie hours. An answer is read only when it must be on its way, within the time limit of all others.
            connection = pool.connection_class(**{**pool.connection_kwargs, "health_check_interval": 0})
            self._waiting[queue] = connection
            connection.connect()

    def take(self, timeout_s: float, most: int) -> list[Taken]:
        """Return what waits, at most about `most` of each queue, after waiting up to `timeout_s` for the first message."""
        for queue in self._waiting:
            if queue not in self._armed:
                self._send(queue)
        came_before = self._ready(0.0)
        ready = came_before or self._ready(timeout_s)
        now = time.monotonic()
        if now >= self._next_rescue:
            self._next_rescue = now + RESCUE_S
            self._put_back(self._lists.values())
        looked, expects_more = now >= self._next_look, bool(came_before)
        if not came_before and ready and self._alone < ONE_BY_ONE:
            time.sleep(PATIENCE_S)
            ready |= self._ready(0.0)
            expects_more = self._in_vain < ONE_BY_ONE
        if not looked and not expects_more:
            return self._count([self._read(queue) for queue in ready])
        sources = self._sources
        if looked:
            self._next_look = now + _LOOK_S
            sources = self._sources + self._prioritised
        found = self._take(keys=sources, args=[most])
        lengths, messages = found[: len(sources) // 2], found[len(sources) // 2 :]
        moved = [
            self._read(queue)
            for (queue, name), length in zip(self._lists.items(), lengths, strict=False)
            if length > self._unacknowledged[name] and queue in self._armed
        ]
        for queue in ready & self._armed:
            # It is readable though it has brought nothing: that raises where the connection has ended.
            self._waiting[queue].can_read(0)
        self._in_vain = 0 if messages else self._in_vain + 1
        return self._count([*moved, *zip((name.decode() for name in messages[::2]), messages[1::2], strict=True)])

    def _count(self, taken: list[Taken]) -> list[Taken]:
        if taken:
            self._alone = self._alone + 1 if len(taken) == 1 else 0
        for name, _ in taken:
            self._unacknowledged[name] += 1
        return taken

    def settle(self, messages: Mapping[str, Sequence[bytes]], taken: Sequence[Taken]) -> None:
        """Put messages into queues, those of a queue in order, and forget those taken for good: both, or neither.

        Those that an earlier intake had taken have been put back, and come again.
        """
        # From the tail, where the oldest are: found at once.
        own = [("LREM", key, -1, message) for key, message in taken if key in self._unacknowledged]
        commands = [*(("LPUSH", queue, *of_queue) for queue, of_queue in messages.items()), *own]
        queue = next((queue for queue in self._waiting if queue not in self._armed), None)
        if queue is None:
            with self._client.pipeline() as pipe:
                for command in commands:
                    pipe.execute_command(*command)  # type: ignore[no-untyped-call]
                pipe.execute()
        else:
            whole = [("MULTI",), *commands, ("EXEC",)] if len(commands) > 1 else commands
            self._send(queue, *whole)
            for answer in [self._waiting[queue].read_response() for _ in whole]:
                for error in answer if isinstance(answer, list) else ():
                    if isinstance(error, RedisError):
                        raise error
            if self._waiting[queue].can_read(0):
                self._answered.add(queue)  # it lies in a buffer by now, where `poll` does not look
        for _, key, *_ in own:
            self._unacknowledged[key] -= 1

    def close(self) -> None:
        """Give the connections back. What was taken and not acknowledged goes back to its queue with the next opening."""
        for connection in self._waiting.values():
            connection.disconnect()  # type: ignore[no-untyped-call]
        self._pool.disconnect()

    def _put_back(self, used: Iterable[str]) -> None:
        self._rescue(keys=[self._names], args=[self._oldest, *used])

    def _send(self, queue: str, *before: Sequence[Any]) -> None:
        """Begin a blocking move, after the commands `before`, whose answers are to be read first."""
        connection = self._waiting[queue]
        commands = [*before, ("BLMOVE", queue, self._lists[queue], "RIGHT", "LEFT", 0)]
        connection.send_packed_command(connection.pack_commands(commands))  # type: ignore[no-untyped-call]
        self._armed.add(queue)

    def _ready(self, timeout_s: float) -> set[str]:
        """Return the queues whose connections can be read, after waiting up to `timeout_s` for one."""
        # redis-py has no public way to wait for several connections; kombu reaches for the socket likewise.
        sockets: dict[Any, str] = {connection._sock: queue for queue, connection in self._waiting.items()}
        poller = select.poll()
        for each in sockets:
            poller.register(each, select.POLLIN)
        readable = dict(poller.poll(0.0 if self._answered else timeout_s * 1000))
        answered, self._answered = self._answered, set()
        return {queue for each, queue in sockets.items() if each.fileno() in readable} | answered

    def _read(self, queue: str) -> Taken:
        self._armed.discard(queue)
        message = self._waiting[queue].read_response()
        if not isinstance(message, bytes):
            raise RedisError(f"a blocking move answered {message!r}")
        return self._lists[queue], message
