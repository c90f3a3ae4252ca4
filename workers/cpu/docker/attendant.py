"""The attendant: process 1 of every container, a POSIX shell that keeps it standing and buries what has died.

Only text is made here. The script uses nothing but what every POSIX shell has built in, so an image needs `/bin/sh` and
no other program.

1. It reads the FIFO `alive`, which the worker holds open for writing as long as it lives. When the worker has gone, the
   attendant reads the end of the file and exits; with process 1 the kernel ends every process of the container, which its
   engine then removes. A worker that vanishes leaves nothing behind.
2. `alive` belongs to the worker's user, and commands run as another one that may only read it. So no command can keep it
   open. Where the worker is not root they are the same user; then what a worker left is found by its label instead.
3. Each line on `alive` has it collect the children that have ended: orphans are handed to process 1.
4. Sessions' shells are no children of it: `kill -9 -1` spares process 1 by the kernel's own rule, and the next shell comes
   from the engine, as the first did.
"""

from __future__ import annotations

INSIDE = "/run/tangram"
"""Where a container sees the control folder of its environment."""

ALIVE, HELLO = "alive", "hello"
STATES, STATES_INSIDE = "states", "/run/tangram-states"
"""The folder in it for what shells write themselves, and where a container sees that; all else it can only read."""

SCRIPT = f"""
if command -v bash >{INSIDE}/{HELLO} 2>/dev/null; then :; else echo /bin/sh >{INSIDE}/{HELLO}; fi
exec <{INSIDE}/{ALIVE} >/dev/null 2>&1
while read -r line; do jobs; done
"""
