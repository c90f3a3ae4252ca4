"""Benchmarks: each is a module that is run, prints what it measured with its spread, and judges by ratios in one run."""
