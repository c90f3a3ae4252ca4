"""Quotas: which actions may call an outside API now."""
