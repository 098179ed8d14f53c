"""Readers of nodes' timer logs, for the format "timerlog" and for the audit.

Read `log_plan.py` first. Unlike the rest of `timerspark/`, it reads files, with the codecs of
`timer/`, and connects to no node.
"""
