"""A cluster in memory for tests of applications: the real one's behaviour, and a clock to turn.

`FakeCluster` is for threads, `AsyncFakeCluster` for asyncio; docs/testing.md shows their use.
"""

from timerfake.cluster import AsyncFakeCluster, FakeCluster

__all__ = ["AsyncFakeCluster", "FakeCluster"]
