"""Benchmarks of ingest, delivery, lateness, failover, memory and single steps.

Read first: measure.py, and the list MEASURES in __main__.py. docs/performance.md has the figures.
recording.py and bench_audit.py record the clients' traffic for the audit.
Nothing imports this package.
"""
