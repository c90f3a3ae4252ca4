"""Environments made of ordinary processes and folders of this machine, without containers.

Data goes one way: `sandbox.py` opens an `environment.py`, which holds sessions (`session.py`); an `execution.py`
carries one command out in a session. `supervisor.py` runs as a process of its own and owns the session's processes.
This file stays without imports, because the supervisor starts through it.
"""
