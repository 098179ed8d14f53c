"""Files that a node reads again while it runs, and the result of a look at each."""

from dataclasses import dataclass
from enum import StrEnum


class RereadResult(StrEnum):
    """The result of a look at one file."""

    TAKEN = "TAKEN"
    """The new content is in use."""
    UNCHANGED = "UNCHANGED"
    """The content in use is that of the file."""
    KEPT = "KEPT"
    """The file does not fit; the content in use stays."""


@dataclass(frozen=True, slots=True)
class RereadFile:
    """One file after a look at it."""

    setting: str
    """Such as tls.access."""
    path: str
    result: RereadResult
    why: str = ""
    """The reason of KEPT."""
