"""Replays: recorded rollouts, in virtual time or live, and how they are recorded."""
