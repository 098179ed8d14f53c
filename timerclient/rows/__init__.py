"""Rows and messages: from an application's arguments to columns, and from columns to messages.

Streams and clients import from here.
"""
