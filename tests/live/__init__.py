"""Tests on whole stacks."""
