"""Granting cores: the books of a node's cores, and one dispatcher for each way of giving cores out.

`in_order` starts actions in the order of the queue, on as many cores as the policy says. `elastic` hands cores over, and has running
actions grow and shrink.
"""
