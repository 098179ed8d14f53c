"""The timer cluster in a simulated world: the production engine, and clients that use it.

Read `timers.py` first.
"""
