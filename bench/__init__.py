"""Benchmarks of ingest, delivery, lateness, failover, memory and single steps.

Read first: measure.py, and the list MEASURES in __main__.py. docs/performance.md has the figures.
Nothing imports this package.
"""
