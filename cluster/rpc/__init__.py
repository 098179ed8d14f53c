"""The edge of a node: gRPC and HTTP, errors on the wire, and bounds on requests, memory and files.

The API's services import from here.
"""
