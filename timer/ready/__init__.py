"""Fired messages that wait for consumers: queues, pages, spill files, groups and topics.

Read `topic.py` and `queue.py` first. The state machine imports from here.
"""
