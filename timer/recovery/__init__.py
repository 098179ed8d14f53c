"""Restart and repair: engine, manifest, snapshots and the scrub of files.

Read `engine.py` first. `cluster/` and the simulator run it.
"""
