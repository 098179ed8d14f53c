"""The protocol of one replica: a pure state machine, its messages and its majorities.

Read `core.py` and `core_events.py` first. Nothing here does input or output.
"""
