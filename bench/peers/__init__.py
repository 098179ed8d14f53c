"""Other systems that deliver messages at a due time, measured in turn with this one.

Read first: peer.py, the interface of a contestant; then contest.py, the measures. A new peer is one
file with a `Peer` and one line in contestants.py. Nothing imports this package.
"""
