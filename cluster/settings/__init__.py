"""Settings, exit statuses, log format and the wall clock of a node.

Every other folder of `cluster/` may import from here.
"""
