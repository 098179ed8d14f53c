"""Keeps gRPC's C core from writing to stderr: what it has to say comes back as errors of calls.

The core reads its environment once, as grpc is imported; so this is imported before. An application
that sets GRPC_VERBOSITY, or imports grpc before, has its own way.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
