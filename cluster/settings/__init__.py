"""Settings, exit statuses, logs, stacks, wall clock and service manager of a node.

Every other folder of `cluster/` may import from here.
"""
