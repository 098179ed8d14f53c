"""Invariants of a core between two steps. Tests and the simulator check them."""

from replication.core.core import Core
from replication.core.core_events import Role
from replication.core.promise import Promise


def check_invariants(core: Core) -> None:
    """Assert that the core's state is consistent. O(length of the log)."""
    shape, tail = core.shape, core.tail
    assert shape.base_index <= core.commit_index <= shape.last_index
    assert shape.base_index <= core.durable_index <= shape.last_index
    assert tail.first_index - 1 + len(tail) == shape.last_index, (
        tail.first_index,
        len(tail),
        shape.last_index,
    )
    assert tail.first_index - 1 <= core.durable_index, (tail.first_index, core.durable_index)
    assert shape.last_epoch <= core.promise.epoch, (shape.last_epoch, core.promise)
    if core._role is Role.LEADER:  # noqa: SLF001
        assert core.promise == Promise(core.epoch, core.me, core.nonce), core.promise
        for peer, progress in core._progress.items():  # noqa: SLF001
            assert progress.match < progress.next <= shape.last_index + 1, (peer, progress)
    if core._role is Role.CANDIDATE:  # noqa: SLF001
        assert core._bid is not None  # noqa: SLF001
        assert core._bid.under == core.promise, (core._bid.under, core.promise)  # noqa: SLF001
