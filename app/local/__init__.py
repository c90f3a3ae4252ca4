"""The embedded stack of one person: its processes, its Redis, and what it consists of."""
