"""The node itself: assembly, process, signals, memory and the `timerd` command.

Read `build.py` for the assembly, `node.py` for start and stop, `process.py` for a process's life.
"""
