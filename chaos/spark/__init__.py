"""Spark's part: data sources for logs and states, and the session.

The audit and the live audit import from here.
"""
