"""The state plane: its decisions, which are pure, and its shell on the event loop with threads.

Read `state_plane.py` first. Services call `host.py`.
"""
