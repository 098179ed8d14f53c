"""Replication of the timer log: the protocol, its driver and its network shell.

The package knows entries as bytes. It imports `timer` for files and units only.
"""
