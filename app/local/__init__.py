"""The embedded stack of one person: its processes, its Redis, what it consists of, and the demo."""
