"""Observation of a node: views for operators, metrics, lag and lateness.

The HTTP port, the admin service and `node/` read from here.
"""
