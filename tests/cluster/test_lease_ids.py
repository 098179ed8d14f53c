"""Lease ids: a permutation of the leader's numbers that is unpredictable without the key."""

import secrets

from cluster.api.lease_ids import LeaseIds
from timer.model.units import Epoch, LeaseId


def test_each_number_has_an_id_of_its_own_which_only_its_leadership_knows() -> None:
    secret = secrets.token_bytes(32)
    ids, later = LeaseIds(secret, Epoch(1)), LeaseIds(secret, Epoch(2))
    numbers = [*range(1, 2_000), (1 << 40) - 1]
    given = [ids.id_of(LeaseId(number)) for number in numbers]
    assert len({*given}) == len(numbers)
    assert all(0 < each < 1 << 62 for each in given)
    assert [ids.number_of(each) for each in given] == numbers
    assert not any(map(later.number_of, given))
    assert not any(map(LeaseIds(secrets.token_bytes(32), Epoch(1)).number_of, given))


def test_what_is_no_id_has_no_number() -> None:
    ids = LeaseIds(secrets.token_bytes(32), Epoch(1))
    guesses = [0, 1, (1 << 62) - 1, 1 << 62, (1 << 64) - 1]
    neighbours = [ids.id_of(LeaseId(7)) + step for step in (-1, 1)]
    assert [ids.number_of(each) for each in guesses + neighbours] == [0] * 7
