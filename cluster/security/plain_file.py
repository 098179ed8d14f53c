"""Reads of files that an operator may replace while the node runs."""

import errno
import os
import stat


def read_plain(path: str, bytes_max: int) -> bytes:
    """Return the bytes of a regular file, at most `bytes_max` + 1 of them.

    A FIFO in its place would hold the reading thread, and with it all later reloads.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(bytes_max + 1)
