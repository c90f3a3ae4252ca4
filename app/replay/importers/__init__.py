"""Recordings of other projects, read as traces: one file per project, each a function from paths to a `Trace`."""
