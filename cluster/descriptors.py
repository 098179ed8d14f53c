"""Whether this process can open what the next moment asks for: a connection, a file.

A process at its limit of open files takes no connection and writes no manifest. The streams that it
has go on, so its peers see nothing of it: it has to report that itself.
"""

import os
from typing import Final

SPARE: Final = 8
"""Descriptors that have to be free: a connection, and the files of a flush."""


def has_spare() -> bool:
    """Return whether SPARE more files can be opened."""
    held: list[int] = []
    try:
        held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        held += [os.dup(held[0]) for _ in range(SPARE - 1)]
    except OSError:  # EMFILE, or the machine's ENFILE
        return False
    finally:
        for descriptor in held:
            os.close(descriptor)
    return True
