"""Paths of files and folders on a simulated disk."""

from pathlib import Path
from typing import Final

LOG_PATH: Final = Path("/log")
PROMISE_PATH: Final = Path("/promise")
STATE_PATH: Final = Path("/state")
INCOMING_PATH: Final = Path("/incoming")
OUTGOING_PATH: Final = Path("/outgoing")
DAMAGED_PATH: Final = Path("/damaged")
