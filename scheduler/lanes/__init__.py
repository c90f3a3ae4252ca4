"""The lanes: what an action needs decides where it waits and how it is started.

| lane | waits in | units | module |
|---|---|---|---|
| cores, in an environment | its node's or its pod's queue | cores of that node or pod | `scheduler/cpu` |
| cores, anywhere | `floating_cores` | cores of any node of the pool `cpu` | `scheduler/cpu` |
| cells | `floating_cells` | cells of any node of the pool `gpu` | `cells` |
| quota only | the quota's queue | a request; runs on a node of the pool `api` | `dispatch` |
| nothing | `unplaced`, while there is no node | none | `dispatch` |
"""
