"""Requests to servers that run in an environment: which network, which socket, and one exchange of HTTP.

Nothing is imported here.
"""
