"""Descriptors 0 to 2 of a process that was started without some of them."""

import os
import sys


def open_standard_streams() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed; drop errors without stderr.

    Files and sockets of the process would get these numbers. A C library may print to descriptor 2,
    and libuv ends a process that closes one of them. `print` writes to stdout if there is no
    sys.stderr. The processes that it starts get them, too.
    """
    while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(lowest, True)  # noqa: FBT003 -- it has no name
    os.close(lowest)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- for the rest of the process
