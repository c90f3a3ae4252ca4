"""Every life cycle the scheduler knows, each as one table; SQL, CLI and docs use its words.

Action:

| from | on | to |
|---|---|---|
| – | submitted | `waiting`, or at once `rejected`; `failed` where its environment is closed, `lost` where that is lost |
| `waiting` | start | `running` |
| `waiting` | cancelled, queue deadline, environment closed, environment lost | `cancelled`, `timed_out`, `failed`, `lost` |
| `running` | finished | `succeeded`, `failed`, `timed_out`, `cancelled` |
| `running` | node lost | what its stored result says; without one `waiting` when it may run again, else `lost`, as in an environment |
| `running` | an outside API refused it | `waiting` when it may run again, else `succeeded` with the refusal as answer |
| `running` | its node never got it | `waiting` if it draws on quotas alone, else it is sent to its node again |

Environment:

| from | on | to |
|---|---|---|
| – | `cpu.open` submitted | `waiting` |
| `waiting` | placed on a node | `opening` |
| `opening` | opened, failed | `open`, `closed` |
| `open` | `cpu.close`, lease over, trajectory cancelled, client gone | `closing` |
| `closing` | closed | `closed` |
| `opening` | node lost, for the second time | `waiting`, `lost` |
| `open`, `closing` | node lost, ended by itself | `lost` |

Node:

| from | on | to |
|---|---|---|
| – | joined | `up` |
| `up` | three missed beats, or beats that never take up a grant | `lost` |
| `up` | left | `left` |
| `lost`, `left` | joined | `up` |

A service on cells, one instance each, as its worker reports it and its engine lives it (`SERVICE_TRANSITIONS`):

| from | on | to |
|---|---|---|
| `absent` | its cells are granted | `starting` |
| `starting` | the model is loaded from its folder, or is not | `resident`, `failed` |
| `resident` | its cells or their memory are wanted, or it is stopped | `evicting` |
| `evicting` | its weights are in host memory, are dropped, are stuck; calls did not end in time | `host`, `absent`, `failed`, `resident` |
| `host` | cells are granted; host memory is wanted, or its copy goes to other cells | `restoring`, `absent` |
| `restoring` | the weights are back, or are not | `resident`, `failed` |
| `resident`, `host` | its process ended by itself | `failed` |
| `failed` | another try from the folder; it is stopped | `starting`, `absent` |

What passed quickly need not be reported. An instance that takes over the copy of one on other cells is `restoring` next, though it was
`absent`; one that could not even begin is reported as `failed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

End = Literal["succeeded", "failed", "timed_out", "cancelled", "rejected", "lost"]
ActionState = Literal["waiting", "running"] | End
EnvironmentState = Literal["waiting", "opening", "open", "closing", "closed", "lost"]
NodeState = Literal["up", "lost", "left"]
ServiceState = Literal["absent", "starting", "resident", "evicting", "host", "restoring", "failed"]

SERVICE_TRANSITIONS: Final[Mapping[ServiceState, frozenset[ServiceState]]] = {
    "absent": frozenset({"starting"}),
    "starting": frozenset({"resident", "failed"}),
    "resident": frozenset({"evicting", "failed"}),
    "evicting": frozenset({"host", "absent", "failed", "resident"}),
    "host": frozenset({"restoring", "absent", "failed"}),
    "restoring": frozenset({"resident", "failed"}),
    "failed": frozenset({"starting", "absent"}),
}

ENDS: Final[tuple[End, ...]] = ("succeeded", "failed", "timed_out", "cancelled", "rejected", "lost")

MISSED_BEATS: Final = 3
"""Beats a node may miss before it is lost."""

MOST_TRIES: Final = 2
"""Times an action may have lost its node; it is not tried once more after that."""
