"""CRC-32 of bytes one after the other, from those of each: nothing is read again for it.

    crc32(a + b) = crc32(a) put off by len(b) zeros ^ crc32(b)

To put off by zeros is linear over the 32 bits, so for each power of two of bytes a table of 32
words says what becomes of each bit, and a length is as many of them as it has bits set.
"""

import zlib
from functools import cache
from typing import Final

_BITS: Final = 32


def joined(first: int, second: int, size: int) -> int:
    """Return zlib's CRC-32 of two stretches, the second of which has `size` bytes."""
    for power in range(size.bit_length()):
        if size >> power & 1:
            first = _after(_table(power), first)
    return first ^ second


def _after(table: tuple[int, ...], crc32: int) -> int:
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
    """Return what each bit of a CRC-32 becomes by 2 ** `power` zeros."""
    if power == 0:
        return tuple(zlib.crc32(b"\0", 1 << bit) ^ zlib.crc32(b"\0") for bit in range(_BITS))
    half = _table(power - 1)
    return tuple(_after(half, word) for word in half)
