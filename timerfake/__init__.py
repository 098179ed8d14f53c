"""An in-memory cluster for tests of applications: a real node's behaviour on a manual clock.

`FakeCluster` is for threads, `AsyncFakeCluster` for asyncio. docs/testing.md shows their use.
"""

from timerfake.cluster import AsyncFakeCluster, FakeCluster

__all__ = ["AsyncFakeCluster", "FakeCluster"]
