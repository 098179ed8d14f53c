"""The deterministic state machine: committed entries in, equal state on every replica out.

Read `machine.py` first. Leader, engine and simulator import from here.
"""
