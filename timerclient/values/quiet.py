"""Stops gRPC's C core from writing to stderr; its failures are raised as errors of calls.

The core reads its environment once, when grpc is imported, so this module is imported first. It
has no effect if the application sets GRPC_VERBOSITY or has already imported grpc.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
