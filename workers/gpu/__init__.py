"""What a GPU node computes with: devices, services and the engines behind them.

A plain library for many threads. Only the glue files `tasks.py` and `node.py` know Celery.
"""
