"""Containers as sandboxes, on a real Docker engine."""
