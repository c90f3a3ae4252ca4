"""Figures for Prometheus: what each process of a deployment counts, and the endpoint at which it is read.

`families.py` declares every metric once. `exposition.py` serves those of a process at `TANGRAM_METRICS_PORT`. `scheduler.py` and
`ledger.py` count what the scheduler writes into its journal, `worker.py` what a worker runs, and `celery_events.py` is a process of
its own that counts Celery's events.
"""
