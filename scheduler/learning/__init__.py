"""What is learned from actions that have run: how much work is left of those that run now."""
