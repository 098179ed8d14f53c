"""Timers that have not fired: in memory first, in sorted runs on disk later.

`store.py` is the entry point. The state machine and the engine import it.
"""
