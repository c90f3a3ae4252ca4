"""The container sandbox: environments are Docker containers that own no core until one of their actions runs.

`sandbox.py` says what it gives and what it protects from; `container.py` one container's life; `cgroups/` how a grant is
written and taken back; `images.py` where images come from. This file stays without imports.
"""
