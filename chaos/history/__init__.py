"""Histories: records of clients, their check, and the archive of logs.

`docs/history-format.md` is the contract. Workloads write histories, the audit reads them.
"""
