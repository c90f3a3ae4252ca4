"""The lanes: what an action needs decides where it waits and how it is started.

| lane | waits in | units | module |
|---|---|---|---|
| cores, in an environment | its node's or its pod's queue | cores of that node or pod | `cores`, `elastic` |
| cores, anywhere | `floating_cores` | cores of any node of the pool `cpu` | `cores`, `elastic` |
| cells | `floating_cells` | cells of any node of the pool `gpu` | `scheduler/gpu` |
| quota only | the quota's queue | a request; runs on a node of the pool `api` | `dispatch` |
| nothing | `unplaced`, while there is no node | none | `dispatch` |

Cores are given out in two ways: as a policy says for the candidates of the moment (`cores`), or kept in order all the
time and given and taken by the rung (`elastic`).
"""
