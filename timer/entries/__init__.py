"""Bytes of the log's entries: their frame, checksum and payloads, and the check before an append.

The engine, the replication driver and the audit's readers import from here.
"""
