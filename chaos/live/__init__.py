"""The live audit: exporter, witness and a streaming job beside a running cluster.

`docs/live-audit.md` says how to run it.
"""
