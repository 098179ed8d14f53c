"""The simulated world: virtual time, disks, network, nodes, faults and the referee.

Read `world.py` first.
"""
