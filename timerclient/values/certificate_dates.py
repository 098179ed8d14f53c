"""The dates of a certificate, read from its bytes; the standard library does not read them.

    Certificate { { [0] version?, serial, algorithm, issuer, validity { begin, end }, ... }, ... }

gRPC or OpenSSL has read the certificate before, so its fields are where X.509 has them.
"""

import base64
import datetime
import functools
import re
import time
from typing import Final, NamedTuple

_PEM: Final = re.compile(
    rb"-----BEGIN ((?:X509 |TRUSTED )?CERTIFICATE)-----(.*?)-----END \1-----", re.DOTALL
)
"""The three headers that OpenSSL reads. Behind a TRUSTED certificate are bytes of OpenSSL's own."""
_LONG: Final = 0x80
_VERSION, _UTC_TIME = 0xA0, 0x17
_FORMS: Final = {_UTC_TIME: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


class Validity(NamedTuple):
    """The Unix times at which a certificate begins to be valid, and expires."""

    begin_s: float
    end_s: float


@functools.lru_cache(maxsize=4_096)
def end_of_certificate_s(pem: bytes) -> float:
    """Return the Unix time at which a certificate (PEM, the first of several) expires.

    Raises:
        ValueError: the bytes are no certificate.
    """
    return validities_in(pem)[0].end_s


def validities_in(pem: bytes) -> list[Validity]:
    """Return the dates of each certificate in the text of a file, at least one.

    Raises:
        ValueError: there is none, or one is damaged.
    """
    found = _PEM.findall(pem)
    if not found:
        raise ValueError("no certificate in PEM")
    return [_validity_in(base64.decodebytes(body)) for _, body in found]


def utc_text(unix_s: float) -> str:
    """Return a time as in 2030-01-31T09:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def _validity_in(der: bytes) -> Validity:
    fields = _content(_content(der)[1])[1]
    tag, _, after = _content(fields)
    skipped = 4 if tag == _VERSION else 3
    for _ in range(skipped):
        _, _, after = _content(fields)
        fields = after
    _, validity, _ = _content(fields)
    begin_tag, begin, after = _content(validity)
    end_tag, end, _ = _content(after)
    return Validity(_time_s(begin_tag, begin), _time_s(end_tag, end))


def _time_s(tag: int, content: bytes) -> float:
    form = _FORMS.get(tag)
    if form is None:
        raise ValueError(f"a time with the tag {tag}")
    found = datetime.datetime.strptime(content.decode("ascii") + "+0000", f"{form}%z")
    return found.timestamp()


def _content(data: bytes) -> tuple[int, bytes, bytes]:
    """Return (tag, content, bytes behind) of the first value in DER.

    Raises:
        ValueError: the bytes end before the value does.
    """
    if len(data) < 2:
        raise ValueError("a value without a length")
    tag, size, at = data[0], data[1], 2
    if size & _LONG:
        at += size & ~_LONG
        size = int.from_bytes(data[2:at], "big")
    if at + size > len(data):
        raise ValueError(f"a value of {size} bytes, of which {len(data) - at} are there")
    return tag, data[at : at + size], data[at + size :]
