"""A cluster of three nodes on this machine: `timerctl local`.

Read `local.py` first. The chaos suite, the demo and the benchmarks import this package.
"""
