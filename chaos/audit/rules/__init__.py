"""Rules of the audit: the violations, as joins of tables. A file has the rules of one subject.

The job imports them. Read first: queries.py, verdicts.sql.
"""
