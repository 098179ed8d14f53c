"""Rules of the audit: one module per kind of violation, as joins of tables.

Read `verdict.py` first. The job calls them.
"""
