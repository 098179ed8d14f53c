"""Queues larger than memory: reads return the fired messages, through spills and failovers."""

import pytest

from tests.seeds import seeds
from tests.timer.mailroom import make_tight, run_mailroom


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_queue_larger_than_memory_gives_every_message_until_it_is_acked(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tight(monkeypatch)
    run_mailroom(seed)
