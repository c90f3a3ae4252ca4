"""What a GPU node computes with: devices, services and the engines behind them.

A plain library for many threads. Only `tasks.py` and `workers/node.py` know Celery.
"""
