"""Two settings of gRPC's C core, for which this module is imported before grpc.

- It writes nothing to stderr; its failures are raised as errors of calls.
- It starts no threads in a forked process. There they would crash the process at random, also one
  that never uses a client, because grpc.aio has no support for forks.

The core reads its environment once. The module has no effect on a variable that the application
sets, and none if the application has already imported grpc.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
