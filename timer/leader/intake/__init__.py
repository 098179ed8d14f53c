"""Admission of new timers: due times, quotas, limits and the cluster's clock.

The leader imports from here.
"""
