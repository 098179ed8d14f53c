"""The node itself: assembly, process, operators' commands, signals, memory and `timerd`.

Read `build.py` for the assembly, `node.py` for start and stop, `process.py` for a process's life.
"""
