"""Persistent shell sessions: the protocol between a worker and a shell, whatever holds the shell's processes.

`backend.py` says what a session asks of the thing that owns its processes; `process/` and `docker/` beside this package are
two of these. Nothing here walks /proc, writes a cgroup or knows a container. This file stays without imports.
"""
