"""The live audit: a witness, and a job that follows a running cluster's logs.

`docs/live-audit.md` says how to run it.
"""
