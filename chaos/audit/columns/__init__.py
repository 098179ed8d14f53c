"""Columns of large runs: plainly correct timers are passed without Spark's joins.

The job calls it for runs of many timers.
"""
