"""The files of access rules and of tokens, which are read again while the node runs."""

from cluster.rpc.watched_file import WatchedFile
from cluster.security.access_rules import AccessRules, parse_rules
from cluster.security.token_hashes import TokenHashes, parse_tokens


class AccessFile(WatchedFile[AccessRules]):
    """The rules in force."""

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or a rule is malformed.
        """
        super().__init__("tls.access", path, parse_rules, "access rules")

    @property
    def rules(self) -> AccessRules:
        """The rules in force."""
        return self.content


class TokenFile(WatchedFile[TokenHashes]):
    """The tokens in force."""

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or a token is malformed.
        """
        super().__init__("tls.tokens", path, parse_tokens, "tokens")
