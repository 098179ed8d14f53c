"""CRC-32 of concatenated bytes, computed from the CRC-32 of each part without reading them again.

    crc32(a + b) = shift(crc32(a), len(b)) ^ crc32(b)

`shift` appends zero bytes. It is linear over the 32 bits. For each power of two of zero bytes, a
table of 32 words has the image of each bit. A length needs one table for each bit set in it.
"""

from functools import cache
from typing import Final

from isal import isal_zlib

_BITS: Final = 32


def concat_crc32(first: int, second: int, size: int) -> int:
    """Return zlib's CRC-32 of two concatenated parts. The second has `size` bytes."""
    for power in range(size.bit_length()):
        if size >> power & 1:
            first = _append_zeros(_table(power), first)
    return first ^ second


def _append_zeros(table: tuple[int, ...], crc32: int) -> int:
    found = 0
    for word in table:
        if crc32 & 1:
            found ^= word
        crc32 >>= 1
        if not crc32:
            break
    return found


@cache
def _table(power: int) -> tuple[int, ...]:
    """Return the image of each bit of a CRC-32 after 2 ** `power` zero bytes."""
    if power == 0:
        return tuple(
            isal_zlib.crc32(b"\0", 1 << bit) ^ isal_zlib.crc32(b"\0") for bit in range(_BITS)
        )
    half = _table(power - 1)
    return tuple(_append_zeros(half, word) for word in half)
