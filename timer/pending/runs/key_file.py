"""Key files: which rows of a run have a key, by hash, format version 2.

One lies beside each run that has rows with keys. Little-endian:

    0   8  magic        b"TIMERKEY"
    8   4  version      2
    12  4  crc32        of bytes [16, 32) and of the filter and the fences
    16  8  entries      n >= 1
    24  4  blocks       b >= 1, of the filter
    28  4  pages        p = n / 92, rounded up
    32     filter       b x 64 bytes: a Bloom filter in blocks, 16 bits a key
           fences       p x u64: the first hash of each page
           pages        each: crc32 of its entries u32, 4 x 0; 92 x ENTRY, in the last one the
                        remaining entries

A checksum stands before its bytes. After them it would cancel them in the checksum of the whole
file: the CRC-32 of any bytes followed by their own CRC-32 is a constant. Different files would then
have equal checksums. A snapshot that continues from another source compares these to tell its files
apart.

Entries are sorted by hash. Filter and fences are read once and stay in memory: about 2 bytes a key.
If the run does not have a key, its look-up reads no page (except one time in a thousand). Otherwise
it reads one or two.

A hash only finds candidates: see timer/pending/memory/key_index.py. The key itself is in the run,
at `key_at`.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from timer.files.disk import Disk
from timer.model.columns import I64, U64
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.timer_id import mix, mix_one
from timer.pending.memory.key_index import spans

VERSION: Final = 2
SUFFIX: Final = ".keys"
MAGIC: Final = b"TIMERKEY"
PAGE_ENTRIES: Final = 92
BITS_PER_KEY: Final = 16
PROBES: Final = 7

ENTRY: Final = np.dtype(
    [
        ("hash", "<u8"),
        ("due_ms", "<i8"),
        ("seq", "<u8"),
        ("key_at", "<u8"),  # of the key's bytes, in the run's file
        ("key_size", "<u4"),
        ("topic", "<u4"),
        ("payload_size", "<u4"),
    ]
)
Entries = npt.NDArray[np.void]
"""A numpy array of dtype `ENTRY`."""

_PREFIX: Final = struct.Struct("<8sII")
_COUNTS: Final = struct.Struct("<QII")
_HEAD_SIZE: Final = _PREFIX.size + _COUNTS.size
_SUM: Final = struct.Struct("<I4x")
_BLOCK_BITS: Final = 512
_BLOCK_SIZE: Final = _BLOCK_BITS // 8
_PAGE_SIZE: Final = PAGE_ENTRIES * ENTRY.itemsize + _SUM.size
_BLOCKS_AT_ONCE: Final = 16_384
_PAGES_AT_ONCE: Final = 256


def encode(entries: Entries) -> Iterator[bytes]:
    """Yield the bytes of a key file for n >= 1 entries in any order, a megabyte at a time."""
    assert len(entries) > 0
    entries = entries[np.argsort(entries["hash"], kind="stable")]
    hashes = np.ascontiguousarray(entries["hash"])
    blocks = -(-len(entries) * BITS_PER_KEY // _BLOCK_BITS)
    body = _filter(hashes, blocks) + hashes[::PAGE_ENTRIES].tobytes()
    pages = -(-len(entries) // PAGE_ENTRIES)
    counts = _COUNTS.pack(len(entries), blocks, pages)
    yield _PREFIX.pack(MAGIC, VERSION, isal_zlib.crc32(body, isal_zlib.crc32(counts))) + counts
    yield body
    for first in range(0, len(entries), PAGE_ENTRIES * _PAGES_AT_ONCE):
        yield b"".join(_pages(entries[first : first + PAGE_ENTRIES * _PAGES_AT_ONCE]))


def _pages(entries: Entries) -> Iterator[bytes]:
    for first in range(0, len(entries), PAGE_ENTRIES):
        data = entries[first : first + PAGE_ENTRIES].tobytes()
        yield _SUM.pack(isal_zlib.crc32(data))
        yield data


def _filter(hashes: U64, blocks: int) -> bytes:
    """Return the blocks of the filter over sorted hashes. The keys of a block lie side by side."""
    block = _block_of(hashes, blocks)
    bits = _bits_of(hashes)
    pieces = []
    for first in range(0, blocks, _BLOCKS_AT_ONCE):
        count = min(_BLOCKS_AT_ONCE, blocks - first)
        low, high = block.searchsorted([first, first + count])
        flags = np.zeros(count * _BLOCK_BITS, np.bool_)
        at = (block[low:high] - first) * _BLOCK_BITS
        for probe in bits:
            flags[at + probe[low:high]] = True
        pieces.append(np.packbits(flags, bitorder="little").tobytes())
    return b"".join(pieces)


def _block_of(hashes: U64, blocks: int) -> I64:
    """Return each hash's block, which rises with the hash."""
    high = hashes >> np.uint64(32)
    return (high * np.uint64(blocks) >> np.uint64(32)).astype(np.int64)


def _bits_of(hashes: U64) -> list[I64]:
    """Return, for each probe, the bit within the block (n,): nine bits of a second hash."""
    other = mix(hashes)
    mask = np.uint64(_BLOCK_BITS - 1)
    return [(other >> np.uint64(9 * i) & mask).astype(np.int64) for i in range(PROBES)]


class KeyFile:
    """A key file. It is read page by page."""

    def __init__(self, disk: Disk, path: Path) -> None:
        """Read the filter and the fences.

        Raises:
            FileNotFoundError: there is no such file.
            CorruptFileError: filter or fences are damaged, or it is no key file.
            UnknownVersionError: another version wrote it.
        """
        self._disk, self._path = disk, path
        head = disk.read(path, 0, _HEAD_SIZE)
        if len(head) < _HEAD_SIZE or head[:8] != MAGIC:
            raise CorruptFileError(path, 0, "not a key file: too short, or without its magic")
        _, version, crc32 = _PREFIX.unpack_from(head)
        self.entries, blocks, pages = _COUNTS.unpack_from(head, _PREFIX.size)
        if version != VERSION:
            raise UnknownVersionError(path, version, VERSION)
        size = blocks * _BLOCK_SIZE + 8 * pages
        body = disk.read(path, _HEAD_SIZE, size)
        if isal_zlib.crc32(body, isal_zlib.crc32(head[_PREFIX.size :])) != crc32:
            raise CorruptFileError(path, _HEAD_SIZE, "checksum mismatch of filter and fences")
        self._blocks, self._body = blocks, body
        self._filter = np.frombuffer(body, np.uint8, blocks * _BLOCK_SIZE)
        self._fences = np.frombuffer(body, "<u8", pages, blocks * _BLOCK_SIZE)
        self._pages_at = _HEAD_SIZE + size

    def check(self, pace: Callable[[int], None]) -> None:
        """Read and check all pages. `pace` is called with the number of bytes read.

        Raises:
            CorruptFileError: a page is damaged.
        """
        pace(self._pages_at)
        for number in range(len(self._fences)):
            self._read([number])
            if (number + 1) % _PAGES_AT_ONCE == 0:
                pace(_PAGES_AT_ONCE * _PAGE_SIZE)
        pace(len(self._fences) % _PAGES_AT_ONCE * _PAGE_SIZE)

    def may_have_one(self, hashed: int) -> bool:
        """Return `may_have` of one hash, many times faster. Few of many runs may have a key."""
        at = (hashed >> 32) * self._blocks >> 32
        other, block = mix_one(hashed), at * _BLOCK_SIZE
        for probe in range(PROBES):
            bit = other >> 9 * probe & _BLOCK_BITS - 1
            if not self._body[block + (bit >> 3)] >> (bit & 7) & 1:
                return False
        return True

    def may_have(self, hashes: U64) -> npt.NDArray[np.bool_]:
        """Return which hashes may be in the file (n, bool). The others are not in it."""
        at = _block_of(hashes, self._blocks) * _BLOCK_SIZE
        found = np.ones(len(hashes), np.bool_)
        for bit in _bits_of(hashes):
            found &= (self._filter[at + (bit >> 3)] >> (bit & 7).astype(np.uint8) & 1).astype(
                np.bool_
            )
        return found

    def find(self, hashes: U64) -> tuple[npt.NDArray[np.intp], Entries]:
        """Return (number of the hash, entry) of every row with one of them, in any order.

        Raises:
            CorruptFileError: a page is damaged.
        """
        if len(hashes) == 1 and not self.may_have_one(hashes.item()):
            return np.empty(0, np.intp), np.empty(0, ENTRY)
        hit = np.flatnonzero(self.may_have(hashes))
        if not len(hit):
            return hit, np.empty(0, ENTRY)
        wanted = hashes[hit]
        # Equal hashes may span pages: the page before a fence may end with the fence's hash.
        first = np.maximum(self._fences.searchsorted(wanted, "left") - 1, 0)
        last = np.maximum(self._fences.searchsorted(wanted, "right") - 1, 0)
        pages = np.unique(spans(first, last - first + 1))
        entries = np.frombuffer(b"".join(self._read(pages.tolist())), ENTRY)
        known = np.ascontiguousarray(entries["hash"])
        low = known.searchsorted(wanted, "left")
        count = known.searchsorted(wanted, "right") - low
        return np.repeat(hit, count), entries[spans(low, count)]

    def _read(self, pages: Sequence[int]) -> list[bytes]:
        """Return the entries of each page, checked."""
        parts = [
            (
                self._pages_at + page * _PAGE_SIZE,
                _SUM.size + min(PAGE_ENTRIES, self.entries - page * PAGE_ENTRIES) * ENTRY.itemsize,
            )
            for page in pages
        ]
        found: list[bytes] = []
        for (position, size), read in zip(
            parts, self._disk.read_parts(self._path, parts), strict=True
        ):
            data = read[_SUM.size :]
            if len(read) < size or _SUM.pack(isal_zlib.crc32(data)) != read[: _SUM.size]:
                raise CorruptFileError(self._path, position, "checksum mismatch of a page")
            found.append(data)
        return found
