"""The stage of a chaos run: nodes, networks, disks and states, before and after it.

Read `stage.py` first.
"""
