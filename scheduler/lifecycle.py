"""Every life cycle the scheduler knows, each as one table; SQL, CLI and docs use its words.

Action:

| from | on | to |
|---|---|---|
| – | submitted | `waiting`, or `rejected` at once |
| `waiting` | start | `running` |
| `waiting` | cancelled, queue deadline, environment gone | `cancelled`, `timed_out`, `failed` |
| `running` | finished | `succeeded`, `failed`, `timed_out`, `cancelled` |
| `running` | node lost | `waiting` when it may run again, else `lost` |
| `running` | an outside API refused it | `waiting` when it may run again, else `succeeded` with the refusal as answer |

Environment:

| from | on | to |
|---|---|---|
| – | `cpu.open` submitted | `waiting` |
| `waiting` | placed on a node | `opening` |
| `opening` | opened, failed | `open`, `closed` |
| `open` | `cpu.close`, lease over, trajectory cancelled | `closing` |
| `closing` | closed | `closed` |
| `opening` | node lost | `waiting` |
| `open`, `closing` | node lost | `lost` |

Node:

| from | on | to |
|---|---|---|
| – | joined | `up` |
| `up` | three missed beats, or beats that never take up a grant | `lost` |
| `up` | left | `left` |
| `lost`, `left` | joined | `up` |
"""

from __future__ import annotations

from typing import Final, Literal

End = Literal["succeeded", "failed", "timed_out", "cancelled", "rejected", "lost"]
ActionState = Literal["waiting", "running"] | End
EnvironmentState = Literal["waiting", "opening", "open", "closing", "closed", "lost"]
NodeState = Literal["up", "lost", "left"]

ENDS: Final[tuple[End, ...]] = ("succeeded", "failed", "timed_out", "cancelled", "rejected", "lost")

MISSED_BEATS: Final = 3
"""Beats a node may miss before it is lost."""

MOST_TRIES: Final = 2
"""Times an action may have lost its node; it is not tried once more after that."""
