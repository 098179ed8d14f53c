"""The limit of open files and sockets of the process.

At its limit a process can neither accept a connection nor write a run. With the usual limit of
1,024 a thousand idle sockets would end it. So the soft limit is raised to the hard one, which must
be high enough. At the limit open streams continue, and peers notice nothing. The process therefore
reports the shortage itself.
"""

import os
import resource
from typing import Final

from timer.model.timer_errors import ConfigError

FILES_MIN: Final = 4_096
"""The lowest hard limit with which a node starts."""
SPARE: Final = 8
"""Descriptors that must stay free: one for a connection, the rest for the files of a flush."""
RESERVED: Final = 1_024
"""Descriptors that client connections may not take: for the log, runs, merges, peers and the HTTP
port with HTTP_RESERVED connections."""
HTTP_RESERVED: Final = 256


def raise_limit() -> int:
    """Raise the soft limit to the hard limit; return that.

    Raises:
        ConfigError: the hard limit is too low for a node.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < FILES_MIN:
        limit = f"must be at least {FILES_MIN} open files (ulimit -Hn, LimitNOFILE)"
        raise ConfigError("RLIMIT_NOFILE", hard, limit)
    return hard


def connections_max(wanted: int, ports: int = 1, http: int = HTTP_RESERVED) -> int:
    """Return the connections of clients on each of their gRPC ports, of which there are `ports`.

    It is `wanted`, or fewer by the soft limit. `http`: connections of the HTTP port, at most.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, (soft - RESERVED - max(0, http - HTTP_RESERVED)) // ports))


def has_spare() -> bool:
    """Return whether SPARE more files can be opened now."""
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
