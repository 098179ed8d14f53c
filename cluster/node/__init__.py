"""The node itself: assembly, process, signals, memory and the `timerd` command.

Read `node.py` for the assembly and `process.py` for a process's life.
"""
