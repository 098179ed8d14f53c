"""The state plane's shell: the engine on the event loop, with its threads and its pace.

Read `host.py` first. Services call it.
"""
