"""How many files and sockets the process may have open.

A process at its limit can neither accept a connection nor write a run: a thousand idle sockets, at
the usual limit of 1,024, would end it. So the limit is raised as far as the system allows, and must
be large enough. The streams of a process at its limit go on, so its peers see nothing: it reports
that itself.
"""

import os
import resource
from typing import Final

from timer.model.timer_errors import ConfigError

FILES_MIN: Final = 4_096
SPARE: Final = 8
"""Descriptors that have to be free: a connection, and the files of a flush."""
RESERVED: Final = 1_024
"""Not for connections: the log, runs that are read and merged, peers."""


def raise_limit() -> int:
    """Raise the soft limit to the hard one; return it.

    Raises:
        ConfigError: it is too low for a node.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < FILES_MIN:
        limit = f"at least {FILES_MIN} open files (ulimit -Hn, LimitNOFILE)"
        raise ConfigError("RLIMIT_NOFILE", hard, limit)
    return hard


def connections_max(wanted: int) -> int:
    """Return how many connections clients may have, of so many that are wanted."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - RESERVED))


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
