"""The gateway: HTTP in front of the stack, so that clients of other systems run on it unchanged.

A *shape* is one interface, such as SandboxFusion's; each has a module of its own. What they share is in `server.py`, `tokens.py`,
`sessions.py`, `environments.py` and `calls.py`. A process keeps nothing that another one would need: records of environments are in the
result store, tokens in the journal's database. So any number of processes can serve the same callers.
"""
