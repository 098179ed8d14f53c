"""Spark: the session, and data sources that read nodes' logs and states.

Imported by the audit and the live audit. Read first: timerlog.py.
"""
