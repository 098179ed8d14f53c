"""The bearer token of a client, in place of a certificate. No error and no log has its text."""

import re
from pathlib import Path
from typing import Final

from timerclient.values.errors import InvalidRequest

CHARS_MAX: Final = 256
_PLAIN: Final = re.compile(rf"[!-~]{{1,{CHARS_MAX}}}")


def read_token(token: str | Path) -> str:
    """Return the text of a token. A path: of the file that has it, without white space around it.

    Raises:
        InvalidRequest: The file cannot be read, or the text cannot be a token.
    """
    if isinstance(token, str):
        text = token
    else:
        try:
            with token.open(encoding="ascii", errors="replace") as file:
                text = file.read(2 * CHARS_MAX).strip()
        except OSError as error:
            limit = f"must be a readable file: {error.strerror}"
            raise InvalidRequest.of("token", str(token), limit) from None
    if not _PLAIN.fullmatch(text):
        limit = f"must be 1 to {CHARS_MAX} visible characters of ASCII, without spaces"
        raise InvalidRequest.of("token", "(not shown)", limit)
    return text
