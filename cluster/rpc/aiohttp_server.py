"""The server of aiohttp. Every module of a node imports it from here.

The import of aiohttp reads the certificate authorities of the system twice, for HTTPS clients. That
takes up to a tenth of a node's start, and a node makes no such client. So the import finds none: a
client of aiohttp in this process would trust no server by default.
"""

import os
from typing import Final

_PLACES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables by which OpenSSL finds the authorities of the system."""

_before = {name: os.environ.get(name) for name in _PLACES}
os.environ.update(dict.fromkeys(_PLACES, os.devnull))
try:
    from aiohttp import web
    from aiohttp.web_protocol import RequestHandler
finally:
    for _name, _value in _before.items():
        del os.environ[_name]
        if _value is not None:
            os.environ[_name] = _value

__all__ = ["RequestHandler", "web"]
