"""The Celery application: routing layer, settings, SQL, replay, metrics and the command line."""
