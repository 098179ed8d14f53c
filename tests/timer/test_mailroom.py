"""Queues larger than memory: what is read is what fired, through spills, crashes and failovers."""

import pytest

from tests.timer.mailroom import make_tight, run_mailroom


@pytest.mark.parametrize("seed", range(12))
def test_queue_larger_than_memory_gives_every_message_until_it_is_acked(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tight(monkeypatch)
    run_mailroom(seed)
