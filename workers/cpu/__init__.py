"""CPU actions: environments with persistent shell sessions, and the sandboxes that hold them.

`abstract.py` says what an environment is; a package beside it (`process/`) is one kind of sandbox. This file
stays without imports: helper processes start through it.
"""
