"""The end of a certificate, read from its bytes; the standard library does not read it.

    Certificate { { [0] version?, serial, algorithm, issuer, validity { begin, end }, ... }, ... }

gRPC has verified the certificate before, so its fields are where X.509 has them.
"""

import datetime
import functools
import ssl
from typing import Final

_LONG: Final = 0x80
_VERSION, _UTC_TIME = 0xA0, 0x17
_FORMS: Final = {_UTC_TIME: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


@functools.lru_cache(maxsize=4_096)
def end_of_certificate_s(pem: bytes) -> float:
    """Return the Unix time at which a certificate (PEM, the first of several) expires.

    Raises:
        ValueError: the bytes are no certificate.
    """
    text = pem.decode("ascii")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    der = ssl.PEM_cert_to_DER_cert(text[max(begin, 0) : end + len(ssl.PEM_FOOTER)])
    fields = _content(_content(der)[1])[1]
    tag, _, after = _content(fields)
    skipped = 4 if tag == _VERSION else 3
    for _ in range(skipped):
        _, _, after = _content(fields)
        fields = after
    _, validity, _ = _content(fields)
    _, _, after = _content(validity)
    tag, time, _ = _content(after)
    form = _FORMS.get(tag)
    if form is None:
        raise ValueError(f"a time with the tag {tag}")
    found = datetime.datetime.strptime(time.decode("ascii") + "+0000", f"{form}%z")
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
