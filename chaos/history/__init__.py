"""Histories: records of clients, their check, the archive of logs and readers of log files.

`docs/history-format.md` is the contract. Workloads write histories, the audit reads them.
"""
