"""Metrics of a stack under load, read by a real Prometheus, and spans, read by a collector."""
