"""Files of a node around its life: opening, repair, replacement, recovery, verification and room.

`storage.py` opens a node's files at start.
"""
