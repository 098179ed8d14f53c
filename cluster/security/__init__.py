"""Identities, certificates and access rules. No gRPC here: `cluster/rpc` applies them.

Read `identities.py` first. The edge of a node and the tools for certificates import from here.
"""
