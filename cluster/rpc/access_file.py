"""The file of access rules, which is read again while the node runs."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.security.access_rules import AccessRules, parse_rules
from cluster.security.reread_files import RereadFile, RereadResult
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
        self.rules = self._read()
        self.on_change: list[Callable[[], None]] = []
        """Called when other rules are in force."""
        self._complaint = ""

    def _read(self) -> AccessRules:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(SETTING, str(self._path), str(error)) from None
        return parse_rules(text)

    async def reread(self) -> RereadFile:
        """Put the rules in the file in force; if they are malformed, warn once for each reason.

        No content of the file may end a node, so every error keeps the present rules.
        """
        path = str(self._path)
        try:
            found = await asyncio.to_thread(self._read)
        except Exception as wrong:  # noqa: BLE001
            if str(wrong) != self._complaint:
                logger.warning("the access rules in force stay: %s", wrong)
            self._complaint = str(wrong)
            return RereadFile(SETTING, path, RereadResult.KEPT, str(wrong))
        self._complaint = ""
        if found == self.rules:
            return RereadFile(SETTING, path, RereadResult.UNCHANGED)
        self.rules = found
        logger.warning("new access rules in force")
        for each in self.on_change:
            each()
        return RereadFile(SETTING, path, RereadResult.TAKEN)
