"""Spark: the session, and a data source that reads nodes' states.

Imported by the audit and the live audit. Read first: timerstate.py. Logs are
read by `timerspark/log/`.
"""
