"""Metrics of a stack under load, read by a real Prometheus; spans, read by a collector; and what Flower shows."""
