"""The scheduler: a pure core (`core.py`), its policies and resources, and two drivers, virtual time and live."""
