"""Nodes of the pool `api`: requests to outside APIs under quotas."""
