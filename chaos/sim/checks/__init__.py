"""Checkers of simulated timers: books of promises to clients, each with its name.

Read `book.py` first.
"""
