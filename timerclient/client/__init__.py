"""The two clients: `aio.py` for asyncio, `sync.py` for threads, and their shared calls.

Applications import both from `timerclient`. `timer_client.py` is made of the client for asyncio
(`make fmt`): edit methods in `aio.py` and in the calls.
"""
