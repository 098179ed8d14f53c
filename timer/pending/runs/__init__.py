"""Pending timers in immutable sorted files: writing, reading ahead, merging and finding by key.

Read `run.py` first. It states the file format. The store and recovery import from here.
"""
