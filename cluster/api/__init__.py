"""The public services: schedule, consume, change, look up and administer.

`public_services.py` lists the services. The fake cluster serves the same ones.
"""
