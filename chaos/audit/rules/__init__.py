"""Rules of the audit: the violations, as joins of tables. A module has the rules of one subject.

The job imports them. Read first: verdict.py.
"""
