"""Admission of new timers: due times, quotas, limits, room on disks and the cluster's clock.

The leader imports from here.
"""
