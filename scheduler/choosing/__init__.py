"""Choosers: for policies that serve queues in order, they decide on how many cores or cells an action starts."""
