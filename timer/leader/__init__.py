"""The leader of one epoch: it turns requests and the passing of time into log entries.

Read `leader.py` first. The engine and the fake cluster import from here.
"""
