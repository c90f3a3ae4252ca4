"""Learning: from ended actions, estimate durations and the work left of running actions."""
