"""A deployment over several hosts, each a network namespace of this machine, under faults of its network and its processes."""
