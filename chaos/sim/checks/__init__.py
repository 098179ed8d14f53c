"""Checkers of simulated timers: books of promises to clients, each with its name.

Each raises `Broken` (chaos/sim/world/referee.py) if a promise was not kept. Read `book.py` first.
"""
