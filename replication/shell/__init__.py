"""The replica as it runs: asyncio, gRPC streams, a writer thread and snapshot transfer.

Read `replica.py` first. `cluster/` assembles it.
"""
