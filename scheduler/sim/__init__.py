"""The driver in virtual time: traces, progress and figures."""
