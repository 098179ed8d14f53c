"""The replica as it runs: asyncio, TCP streams, a writer thread and snapshot transfer.

Read `replica.py` first. `cluster/` assembles it.
"""
