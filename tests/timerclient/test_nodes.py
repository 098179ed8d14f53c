"""The search for the leader, on a clock that the test moves."""

import asyncio

import pytest

from timerclient.nodes import PATIENCE_S_MAX, Nodes, tcp
from timerclient.settings import Settings


async def test_patience_outlasts_rounds_in_which_the_hinted_node_and_all_others_are_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    nodes = Nodes(["127.0.0.1:1"], Settings(), tcp(None))
    patience_s = []
    for _ in range(20):
        nodes._look()
        patience_s.append(nodes._patience_s)
        for _ in ("the hinted node", "all"):
            now_s += max(nodes.settings.probe_s, nodes._patience_s)
        now_s += nodes.settings.pause_s_max
    assert patience_s == sorted(patience_s)
    assert patience_s[-1] == PATIENCE_S_MAX
