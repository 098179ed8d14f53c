"""The file of access rules, which is read again while the node runs."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.security.access_rules import AccessRules, parse_rules
from timer.model.timer_errors import ConfigError

logger = logging.getLogger(__name__)

SETTING: Final = "tls.access"


class AccessFile:
    """The rules in force."""

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or a rule is malformed.
        """
        self._path = Path(path)
        self.rules = self.read()
        self.on_change: list[Callable[[], None]] = []
        """Called when other rules are in force."""
        self._complaint = ""

    def read(self) -> AccessRules:
        """Return the rules in the file. Any thread may call it.

        Raises:
            ConfigError: see `__init__`.
        """
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(SETTING, str(self._path), str(error)) from None
        return parse_rules(text)

    def keep(self, why: Exception) -> None:
        """Keep the rules in force, with one warning for each reason."""
        if str(why) != self._complaint:
            logger.warning("the access rules in force stay: %s", why)
        self._complaint = str(why)

    def take(self, found: AccessRules) -> None:
        """Put rules in force."""
        self._complaint = ""
        if found != self.rules:
            self.rules = found
            logger.warning("new access rules in force")
            for each in self.on_change:
                each()
