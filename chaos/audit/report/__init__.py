"""Reports of the audit: figures, text, JSON, charts and the HTML page.

The job writes them at its end.
"""
