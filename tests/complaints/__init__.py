"""Failures that users of neighbouring systems have reported, each shown not to happen here; `docs/known-failures.md` lists them."""
