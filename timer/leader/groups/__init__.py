"""Delivery to consumer groups: leases, acks, dead letters, expiry and deadlines.

Read `group_dispatch.py` first. It is the leader's part for consumers.
"""
