"""Bearer tokens of callers without a certificate. A node knows the hash of each token only.

[[token]]
name = "ci"                             # the identity token/ci, which rules of access name
sha256 = "9f86d081884c7d65..."          # of the token's text, 64 hexadecimal digits
expires = 2027-01-31T00:00:00Z

`timerctl tokens new` makes a token of 256 random bits: no guess finds it from its hash, however
fast the hash is, so no slow hash is needed. Two tokens may have one name, so that a new token can
replace the old one while both are in use. To withdraw the last token, write `token = []`.
"""

import datetime
import hashlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.settings.names import NAME, NAME_RULE
from timer.model.timer_errors import HIDDEN, ConfigError, TokenRejectedError

TOKENS_MAX: Final = 1_000
TOKEN_CHARS_MAX: Final = 256
EXPIRES_S_MAX: Final = 253_370_764_800
"""The year 9999 in Unix seconds: later times have no date in each offset."""
SCHEME: Final = "bearer"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = ("name", "sha256", "expires")


@dataclass(frozen=True, slots=True)
class TokenHash:
    """One token that is accepted until it expires."""

    name: str
    sha256: bytes
    """32 bytes."""
    expires_s: float
    """Unix time."""


def _expires_s(token: TokenHash) -> float:
    return token.expires_s


class TokenHashes:
    """All tokens of a file."""

    def __init__(self, tokens: Sequence[TokenHash] = ()) -> None:
        self._tokens = tuple(tokens)
        self._by_hash = {each.sha256: each for each in tokens}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenHashes) and self._tokens == other._tokens

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[TokenHash]:
        return iter(self._tokens)

    def not_after_s(self) -> dict[str, float]:
        """Return name -> Unix time at which the last token of that name expires."""
        return {each.name: each.expires_s for each in sorted(self._tokens, key=_expires_s)}

    def check(self, sha256: bytes, now_s: float) -> str:
        """Return the name of a token with this hash (32 bytes) at a Unix time.

        The time of the look-up shows at most bits of a hash, which lead to no token.

        Raises:
            TokenRejectedError: it is unknown, or has expired.
        """
        found = self._by_hash.get(sha256)
        if found is None:
            raise TokenRejectedError("the bearer token is unknown")
        if now_s >= found.expires_s:
            at = datetime.datetime.fromtimestamp(found.expires_s, datetime.UTC)
            raise TokenRejectedError(f"token/{found.name} expired at {at:%Y-%m-%dT%H:%M:%SZ}")
        return found.name


def hash_in(values: Sequence[str]) -> bytes:
    """Return the SHA-256 of the token in the values of a request's `authorization`.

    Raises:
        TokenRejectedError: there is not exactly one value, or it is not `Bearer TOKEN`.
    """
    if not values:
        raise TokenRejectedError("no token: send the metadata authorization: Bearer TOKEN")
    scheme, _, token = values[0].partition(" ")
    if len(values) > 1 or scheme.lower() != SCHEME or not 0 < len(token) <= TOKEN_CHARS_MAX:
        raise TokenRejectedError("authorization: must be Bearer TOKEN, once")
    return hashlib.sha256(token.encode(errors="replace")).digest()


def parse_tokens(text: str) -> TokenHashes:
    """Return the tokens of a TOML text.

    Raises:
        ConfigError: the text is not TOML, or a token is malformed; names the token, from 1 on. No
            error repeats a value: a token itself may be there by mistake.
    """
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        where = str(error).rpartition("(at ")[2].rstrip(")")  # the rest may repeat a value
        raise ConfigError("tokens", HIDDEN, f"must be TOML: {where}") from None
    tokens = tables.pop("token", None)
    if tables:
        raise ConfigError("tokens", HIDDEN, "the file must have [[token]] only")
    if not isinstance(tokens, list) or len(tokens) > TOKENS_MAX:
        limit = f"must be at most {TOKENS_MAX} tables [[token]]; without any: token = []"
        raise ConfigError("tokens.token", HIDDEN, limit)
    found = [_token(f"tokens.token {n}", each) for n, each in enumerate(tokens, 1)]
    if len({each.sha256 for each in found}) < len(found):
        raise ConfigError("tokens.token", HIDDEN, "no two tokens may have the same sha256")
    return TokenHashes(found)


def _token(key: str, table: Any) -> TokenHash:
    if not isinstance(table, dict) or sorted(table) != sorted(_KEYS):
        raise ConfigError(key, HIDDEN, f"must be a table [[token]] with {', '.join(_KEYS)}")
    name, sha256, expires = (table[each] for each in _KEYS)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{key}: name", HIDDEN, f"must be {NAME_RULE}")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        limit = "must be 64 hexadecimal digits in lower case: the hash, not the token"
        raise ConfigError(f"{key}: sha256", HIDDEN, limit)
    if not isinstance(expires, datetime.datetime) or expires.utcoffset() is None:
        raise ConfigError(
            f"{key}: expires",
            HIDDEN,
            "must be a time with its offset, such as 2027-01-31T00:00:00Z",
        )
    if not 0 <= expires.timestamp() < EXPIRES_S_MAX:
        raise ConfigError(f"{key}: expires", HIDDEN, "must be a time in the years 1970 to 9998")
    return TokenHash(name, bytes.fromhex(sha256), expires.timestamp())
