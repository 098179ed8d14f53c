"""The two clients: `aio.py` for asyncio, `sync.py` for threads, and their shared calls.

Applications import both from `timerclient`.
"""
