"""The timer cluster in a simulated world: the production engine and its simulated clients.

Read `timers.py` first.
"""
