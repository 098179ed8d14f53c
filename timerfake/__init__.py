"""An in-memory cluster for tests of applications: a real node's behaviour on a manual clock.

`FakeCluster` is for threads, `AsyncFakeCluster` for asyncio. docs/testing.md shows their use.
The first is made of the second (`make fmt`).
"""

from timerfake.cluster import AsyncFakeCluster
from timerfake.thread_cluster import FakeCluster

__all__ = ["AsyncFakeCluster", "FakeCluster"]
