"""Benchmarks of ingest, delivery, lateness, failover, memory and single steps.

`table.py` lists the measures, `docs/performance.md` their figures. Nothing imports this package.
"""
