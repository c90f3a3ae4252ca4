"""Environments made of ordinary processes and folders of this machine, without containers.

`sandbox.py` opens an `environment.py`. Its sessions and their commands are in `workers/cpu/shell/`. Each session has a `backend.py`,
which speaks to a `supervisor.py`: a process of its own, which owns the session's processes. `workers/cpu/handover/` forks it.
This file stays without imports, because the supervisor starts through it.
"""
