"""The `timerctl` command: one module per group of commands.

`timerctl.py` holds the entry point. Other packages add commands by entry points.
"""
