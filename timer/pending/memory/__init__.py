"""Pending timers since the last flush: memtable, timing wheel, tiers and keys.

Read `memtable.py` first. The store imports from here.
"""
