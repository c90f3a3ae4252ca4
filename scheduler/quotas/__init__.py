"""Quotas: who may call which outside API now."""
