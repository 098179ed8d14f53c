"""The CRC-32 combined from parts is the CRC-32 of the whole."""

import random
import zlib

import pytest

from tests.seeds import seeds
from timer.entries.crc import concat_crc32


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_crc_of_two_stretches_is_that_of_both(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [0, 1, 2, 3, 255, 4_096, 70_001, chance.randrange(1 << 18)]
    first, second = (chance.randbytes(chance.choice(sizes)) for _ in range(2))
    found = concat_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)


def test_crc_of_many_in_a_row() -> None:
    pieces = [bytes([at % 251]) * (at * 37) for at in range(60)]
    whole = 0
    for piece in pieces:
        whole = concat_crc32(whole, zlib.crc32(piece), len(piece))
    assert whole == zlib.crc32(b"".join(pieces))
