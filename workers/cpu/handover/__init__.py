"""What of environments outlives a worker, be they processes or containers, and how the next worker goes on with it.

`protocol.py` says who holds what meanwhile, and what is said. `fork_server.py` is the process that keeps it, `fork_client.py` the worker's
side of that, and `adoption.py` what the next worker does. This file stays without imports, because the fork server starts through it.
"""
