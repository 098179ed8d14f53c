"""What paused topics hold back, and when that should be over."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from chaos.oracle.held_story import RELEASE_MS, HeldStory
from chaos.oracle.pending_rows import ROW


def test_what_a_topic_holds_is_late_a_while_after_it_went_on() -> None:
    paused = {1, 2}
    said: Any = SimpleNamespace(pause_of=lambda topic, _: (topic in paused, "all"))
    held = HeldStory(str, said)
    held.policy(1_000, [1, 2], 1_000, 10)
    rows = np.zeros(4, ROW)
    rows["topic"], rows["due_ms"], rows["seq"] = (1, 2, 1, 2), (500, 600, 700, 800), (1, 2, 3, 4)
    held.add(rows)
    assert [each["seq"].tolist() for each in held.remaining_rows(10**9)] == [[1, 2, 3, 4], []]
    paused.remove(1)
    held.policy(2_000, [1, 2], 2_000, 10)
    now_ms = 2_000 + RELEASE_MS
    assert [each["seq"].tolist() for each in held.remaining_rows(now_ms - 1)] == [[1, 2, 3, 4], []]
    assert [each["seq"].tolist() for each in held.remaining_rows(now_ms)] == [[2, 4], [1, 3]]
    held.position = (now_ms, 0)
    while held.sweep(100, 10**6, 100):
        pass
    assert [each["seq"].tolist() for each in held.remaining_rows(now_ms)] == [[2, 4], []]
