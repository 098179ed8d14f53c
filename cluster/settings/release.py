"""This program: its version, and the feature levels that it supports."""

from typing import Final

from timer.model.feature_level import LEVEL_MAX, LEVEL_MIN, ProgramRelease
from timerclient import __version__

RELEASE: Final = ProgramRelease(__version__, LEVEL_MIN, LEVEL_MAX)
