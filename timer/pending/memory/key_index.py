"""Keys: from (topic, key) to the pending row that has it, without a table that grows with them.

    (topic, key) --KeyHasher--> 64 bits --> KeyTiers of the memtable   (hash, place)
                                        --> key file of each run       (hash, due, seq)
                                                 |
                            candidates <---------'   pending, and with equal bytes: found

A key is unique among the pending timers of its topic, so at most one candidate is left. Hashes only
find candidates; the bytes decide. Replicas may find different candidates and still get the same
result. Two keys with one hash cost one more comparison, and change no result.

Each replica hashes with its own secret, which its manifest holds. Otherwise a client could choose
keys that share one hash, and each look-up would compare all of them.
"""

import hashlib
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, U32, U64, Binary
from timer.model.timer_id import mix

Live = Callable[[I64], npt.NDArray[np.bool_]]
"""Returns which of these places hold pending rows."""

SECRET_SIZE: Final = 16
"""Bytes of a hasher's secret."""
_WORD: Final = 8
_ROWS_AT_ONCE: Final = 8_192
_WORDS_AT_FIRST: Final = 16
"""Words of a key for which factors exist from the start. Longer keys add some."""
MERGED_MAX: Final = 65_536
"""Pairs of two tiers that are merged: some milliseconds. More tiers cost a look-up little."""
_LOW: Final = np.uint64(0xFFFF_FFFF)
_HALF: Final = np.uint64(32)


class KeyHasher:
    """Multilinear hashing: a key's 32-bit words, times secret factors, summed up.

    For any two keys, chosen without the secret, one secret in 2 ** 64 gives both the same hash.
    Source: https://arxiv.org/abs/1202.4961. Two sums are made, and their upper halves are used.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self.secret = secret
        self._factors = self._make_factors(_WORDS_AT_FIRST)

    def _make_factors(self, words: int) -> U64:
        """Return factors (words + 2, 2, 2): for the start, topic and size, each word's halves."""
        data = hashlib.shake_256(b"timer keys" + self.secret).digest(4 * _WORD * (words + 2))
        return np.frombuffer(data, "<u8").astype(np.uint64).reshape(-1, 2, 2)

    def __call__(self, topic: U32, keys: Binary) -> U64:
        """Return the hashes (n, uint64) of the keys, each in its topic."""
        sizes = keys.sizes.astype(np.int64)
        words = -(-int(sizes.max()) // _WORD) if len(sizes) else 0
        factors = self._factors  # one reference: another thread may replace the attribute
        if len(factors) < words + 2:
            self._factors = factors = self._make_factors(words)
        (start, other), of_topic = factors[0, 0], factors[1]
        first, second = topic.astype(np.uint64), sizes.astype(np.uint64)
        left = start + first * of_topic[0, 0] + second * of_topic[0, 1]
        right = other + first * of_topic[1, 0] + second * of_topic[1, 1]
        data = np.frombuffer(bytes(keys.blob) + bytes(_WORD), np.uint8)
        starts = np.cumsum(sizes) - sizes
        for begin in range(0, len(sizes), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            _add_words(left[rows], right[rows], data, starts[rows], sizes[rows], factors[2:])
        return mix(left >> _HALF | right & ~_LOW)


def _add_words(
    left: U64, right: U64, data: npt.NDArray[np.uint8], starts: I64, sizes: I64, factors: U64
) -> None:
    """Add the bytes of each key to its sums, eight at a time."""
    ahead = np.arange(_WORD)
    open_ = np.flatnonzero(sizes > 0)
    word = 0
    while len(open_):
        at = starts[open_] + word
        words = data[at[:, None] + ahead].view("<u8").ravel()
        rest = np.minimum(sizes[open_] - word, _WORD).astype(np.uint64)
        words &= np.uint64(0xFFFF_FFFF_FFFF_FFFF) >> (np.uint64(64) - np.uint64(8) * rest)
        low, high, mine = words & _LOW, words >> _HALF, factors[word // _WORD]
        left[open_] += low * mine[0, 0] + high * mine[0, 1]
        right[open_] += low * mine[1, 0] + high * mine[1, 1]
        word += _WORD
        open_ = open_[sizes[open_] > word]


PLAIN_HASHER: Final = KeyHasher()
"""A hasher without a secret, for tests and for checks of files."""


class KeyTiers:
    """Pairs (hash, place) of a memtable's rows, in sorted tiers.

    Each tier is at least twice as long as the next, or both together have more than MERGED_MAX
    pairs. Merges of tiers drop rows that are no longer pending, so a few keys that are set again
    and again do not fill them. Longer tiers keep such rows until the memtable's flush.
    """

    def __init__(self) -> None:
        self._fresh: list[tuple[I64, I64]] = []
        self._tiers: list[tuple[I64, I64]] = []

    def add(self, hashes: U64, places: I64) -> None:
        """Add n pairs."""
        self._fresh.append((hashes.view(np.int64), places))

    def find(self, hashes: U64, live: Live) -> tuple[npt.NDArray[np.intp], I64]:
        """Return (number of the hash, place) of every live row with one of them, in any order."""
        if self._fresh:
            self._seal(live)
        order = np.argsort(hashes.view(np.int64))  # neighbours in a tier are near in memory
        wanted = hashes.view(np.int64)[order]
        which: list[npt.NDArray[np.intp]] = [np.empty(0, np.intp)]
        places: list[I64] = [np.empty(0, np.int64)]
        for tier, place in self._tiers:
            low = tier.searchsorted(wanted, "left")
            hit = np.flatnonzero(tier.take(low, mode="clip") == wanted) if len(tier) else low[:0]
            count = tier.searchsorted(wanted[hit], "right") - low[hit]
            which.append(np.repeat(order[hit], count))
            places.append(place[spans(low[hit], count)])
        found, at = np.concatenate(which), np.concatenate(places)
        lives = live(at)
        return found[lives], at[lives]

    def _seal(self, live: Live) -> None:
        """Make a tier of the fresh pairs. Merge neighbours until each is twice the next."""
        self._tiers.append(_live_pairs(self._fresh, live))
        self._fresh = []
        while len(self._tiers) > 1:
            before, last = (len(hashes) for hashes, _ in self._tiers[-2:])
            if before >= 2 * last or before + last > MERGED_MAX:
                break
            self._tiers[-2:] = [_live_pairs(self._tiers[-2:], live)]


def spans(starts: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return starts[0], starts[0] + 1, ..., counts[0] numbers, then the same for the next start."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(starts - (ends - counts), counts))


def _live_pairs(parts: list[tuple[I64, I64]], live: Live) -> tuple[I64, I64]:
    """Return the pairs of all parts whose rows are alive, sorted."""
    hashes = np.concatenate([hashes for hashes, _ in parts])
    places = np.concatenate([places for _, places in parts])
    lives = live(places)
    hashes, places = hashes[lives], places[lives]
    order = np.argsort(hashes, kind="stable")  # it merges sorted parts
    return hashes[order], places[order]
