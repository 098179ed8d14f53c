"""Lease ids for consumers: the leader's lease numbers, under a keyed permutation.

    number 1, 2, 3, …  <-->  id, 62 bits

A consumer needs the lease id to settle messages, so no other consumer may guess it. The leader
itself uses the number: it shows which lease is older, and fits into columns. The permutation is a
Feistel network of four rounds, with a key for each leadership. Of the 2^62 ids at most 2^40 are
genuine.
"""

import hashlib
from typing import Final

from timer.model.units import Epoch, LeaseId

_HALF_BITS: Final = 31
_HALF: Final = (1 << _HALF_BITS) - 1
_ROUNDS: Final = range(4)
_NUMBERS: Final = 1 << 40
"""Leases of one leadership, at most: 100,000 a second for four months."""


class LeaseIds:
    """The ids of the leases of one leadership."""

    def __init__(self, secret: bytes, epoch: Epoch) -> None:
        """`secret` is random, and never leaves the process."""
        self._keyed = hashlib.blake2b(epoch.to_bytes(8, "little"), key=secret, digest_size=4)

    def id_of(self, number: LeaseId) -> int:
        """Return the id of a lease."""
        assert 0 <= number < _NUMBERS, number
        left, right = number >> _HALF_BITS, number & _HALF
        for turn in _ROUNDS:
            left, right = right, left ^ self._mix(turn, right)
        return left << _HALF_BITS | right

    def number_of(self, lease_id: int) -> LeaseId:
        """Return the number of a lease; 0 if no lease of this leadership has the id."""
        if not 0 < lease_id < 1 << 2 * _HALF_BITS:
            return LeaseId(0)
        left, right = lease_id >> _HALF_BITS, lease_id & _HALF
        for turn in reversed(_ROUNDS):
            left, right = right ^ self._mix(turn, left), left
        number = left << _HALF_BITS | right
        return LeaseId(number if number < _NUMBERS else 0)

    def _mix(self, turn: int, half: int) -> int:
        keyed = self._keyed.copy()
        keyed.update((half << 2 | turn).to_bytes(8, "little"))
        return int.from_bytes(keyed.digest(), "little") & _HALF
