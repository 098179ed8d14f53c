"""Reports of the audit: figures, text, JSON, charts and the HTML page.

The job imports it. Read first: report.py.
"""
