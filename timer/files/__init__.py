"""Files of a node: the disk, its reserve, the data directory, and the timer log with its segments.

`disk.py` is the one door to the file system. The simulator replaces it.
"""
