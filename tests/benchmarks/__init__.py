"""Benchmarks: what waiting, running and many workers cost. No figure here decides an exit code."""
