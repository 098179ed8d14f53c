"""Streams to the leader: nodes and channels, the producer's pipeline, the consumer's subscription.

Read `nodes.py`, `producer.py` and `subscription.py` first.
"""
