"""The container init: process 1 of every container, a POSIX shell that keeps it standing and reaps orphans.

Only text is made here. The script uses nothing but what every POSIX shell has built in, so an image needs `/bin/sh` and no other
program.

1. It reads the FIFO `alive`, which the worker holds open for writing as long as it lives, and for a while what keeps environments for the
   next worker does (`handover/protocol.py`). When both have gone, the init reads the end of the file and exits. The kernel then ends every
   process of the container, and the engine removes it. A worker that vanishes leaves nothing behind.
2. Opening a FIFO for reading waits until somebody has it open for writing: for ever, if the worker has gone. So the init first opens it
   for both, which does not wait, and keeps only the reading end. `hello`, by which it then says that it is up, does not wait either.
3. `alive` belongs to root. It may be written to by others only until the worker has read `hello`, before any command. Commands run as
   another user, who may only read it, so no command can keep it open.
4. Each line on `alive` has it collect the children that have ended: orphans become children of process 1.
5. The shells of sessions are not its children. `kill -9 -1` spares process 1, by the kernel's own rule, and the engine starts the next
   shell as it did the first.
"""

from __future__ import annotations

WORK, TEMPORARY = "/home/user", "/tmp"
"""The folders of a container that its user may write to. The first is HOME, as in process sandboxes; sessions start there."""
FORMER = "/work"
"""A link to the home, whose name it was, in containers whose image has no such folder."""
INSIDE = "/run/tangram"
"""Where a container sees the control folder of its environment."""

ALIVE, HELLO = "alive", "hello"
STATES, STATES_INSIDE = "states", "/run/tangram-states"
"""The folder in it for what shells write themselves, and where a container sees that; all else it can only read."""

SCRIPT = f"""
exec 3<>{INSIDE}/{ALIVE} <{INSIDE}/{ALIVE} 3<>{INSIDE}/{HELLO}
if command -v bash >&3 2>/dev/null; then :; else echo /bin/sh >&3; fi
exec 3>&- >/dev/null 2>&1
while read -r line; do jobs; done
"""
