"""The replicated object: commands are total, idempotent and never step back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.control_state import (
    COMMAND_SIZE_MAX,
    EPOCH_STEP_MAX,
    WHY_SIZE_MAX,
    AppliedCommand,
    Appoint,
    CheckpointPage,
    Command,
    ControlState,
    Init,
    Members,
    Offsets,
    SharedCheckpoint,
    apply,
    dump,
    encode_command,
    load,
    pages,
)
from timer.model.units import EPOCH_MAX, Epoch, LogIndex, QueueOffset, ReplicaId, UnixMs

INIT = Init(cluster_id="test", voters={"a": ReplicaId(1), "b": ReplicaId(2)})
NONCE = 77


def appoint(epoch: int, leader: int, *, expected: int) -> Appoint:
    return Appoint(epoch=Epoch(epoch), leader=ReplicaId(leader), expected_epoch=Epoch(expected))


def checkpoint(epoch: int, index: int, **offsets: int | None) -> SharedCheckpoint:
    return SharedCheckpoint(
        epoch=Epoch(epoch),
        index=LogIndex(index),
        last_read_time_ms=UnixMs(5),
        queue_offsets={t: None if o is None else QueueOffset(o) for t, o in offsets.items()},
        digest="ab" * 32,
        published_at_ms=UnixMs(6),
    )


def after(*commands: Command, state: ControlState | None = None) -> ControlState:
    state = state or ControlState()
    for command in commands:
        state, applied = apply(state, encode_command(command, nonce=NONCE))
        assert applied is not None
    return state


def accepts(state: ControlState, command: Command) -> bool:
    changed, applied = apply(state, encode_command(command, nonce=NONCE))
    assert applied is not None
    assert applied.nonce == NONCE
    if not applied.accepted:
        assert changed is state
    return applied.accepted


def test_cluster_is_founded_once() -> None:
    state = after(INIT, Init(cluster_id="other", voters={}))
    assert state.cluster_id == "test"
    assert state.voters == INIT.voters
    assert state.name_of(ReplicaId(2)) == "b"
    assert state.name_of(None) is None


def test_reason_of_an_appointment_is_kept_and_never_a_reason_to_refuse_it() -> None:
    chosen = replace(appoint(5, 2, expected=0), why="n1: its link broke" + "x" * 1_000)
    state = after(INIT, chosen)
    assert state.why == chosen.why[:WHY_SIZE_MAX]
    assert load(dump(state)) == state
    assert after(appoint(6, 1, expected=5), state=state).why == "", "an older program's"
    fields = msgpack.unpackb(encode_command(appoint(6, 1, expected=5), nonce=NONCE))
    for malformed in (7, None, [b"x"]):
        changed, _ = apply(state, msgpack.packb(fields | {"why": malformed}))
        assert (changed.epoch, changed.why) == (6, "")


def test_epoch_far_above_the_last_one_changes_nothing() -> None:
    state = after(INIT, appoint(5, 2, expected=0))
    far = 5 + EPOCH_STEP_MAX + 1
    assert not accepts(state, appoint(far, 1, expected=5))
    assert not accepts(state, Members(epoch=Epoch(far), voters={}))
    assert not accepts(state, CheckpointPage(checkpoint=checkpoint(far, 1)))
    assert accepts(state, appoint(far - 1, 1, expected=5))
    assert accepts(ControlState(), appoint(EPOCH_MAX, 1, expected=0)), "the log may be far"
    assert not accepts(ControlState(), appoint(EPOCH_MAX + 1, 1, expected=0))


def test_appointment_is_compare_and_set_on_the_epoch() -> None:
    state = after(INIT, appoint(5, 2, expected=0))
    assert (state.epoch, state.leader) == (5, 2)
    assert not accepts(state, appoint(6, 1, expected=0))
    assert not accepts(state, appoint(5, 1, expected=5))
    assert not accepts(state, appoint(4, 1, expected=5))
    assert accepts(state, appoint(9, 1, expected=5))


def test_checkpoint_never_steps_back() -> None:
    state = after(INIT, appoint(2, 1, expected=0), CheckpointPage(checkpoint=checkpoint(2, 10)))
    assert not accepts(state, CheckpointPage(checkpoint=checkpoint(2, 9)))
    assert not accepts(state, CheckpointPage(checkpoint=checkpoint(1, 99)))
    assert accepts(state, CheckpointPage(checkpoint=checkpoint(2, 11)))
    deposed = after(appoint(3, 2, expected=2), state=state)
    assert not accepts(deposed, CheckpointPage(checkpoint=checkpoint(2, 11)))
    assert accepts(deposed, CheckpointPage(checkpoint=checkpoint(3, 11)))


def test_offsets_of_pages_are_merged_and_none_removes() -> None:
    state = after(
        CheckpointPage(checkpoint=checkpoint(1, 1, x=1, y=2)),
        CheckpointPage(checkpoint=checkpoint(1, 2, y=None, z=3)),
    )
    assert state.checkpoint == checkpoint(1, 2, x=1, z=3)


@pytest.mark.parametrize(
    "command",
    [INIT, appoint(5, 2, expected=0), CheckpointPage(checkpoint=checkpoint(1, 1, x=1, y=None))],
    ids=lambda command: command.op,
)
def test_command_applied_twice_changes_nothing_more(command: Command) -> None:
    once = after(command)
    assert once != ControlState()
    assert after(command, state=once) == once


def test_page_costs_what_it_changes_and_not_what_is_there() -> None:
    many = {f"t{n}": n for n in range(5_000)}
    state = after(*pages(ControlState(), checkpoint(1, 1, **many)))
    assert state.checkpoint is not None
    merged = 0
    layers: Sequence[Mapping[str, Any]] = ()
    expected = dict(many)
    for index in range(2, 2_000):
        change: dict[str, int | None] = {f"t{index}": None if index % 7 == 0 else index * 10}
        state = after(CheckpointPage(checkpoint=checkpoint(1, index, **change)), state=state)
        assert state.checkpoint is not None
        assert isinstance(state.checkpoint.queue_offsets, Offsets)
        before, layers = layers, state.checkpoint.queue_offsets._layers
        merged += sum(len(layer) for layer in layers if not any(layer is old for old in before))
        expected.update((t, o) for t, o in change.items() if o is not None)
        for topic in [t for t, o in change.items() if o is None]:
            del expected[topic]
    assert merged <= len(many) + 2 * 2_000 * math.log2(2_000)
    assert state.checkpoint is not None
    found = state.checkpoint.queue_offsets
    assert dict(found) == dict(found.items()) == expected
    assert len(found) == len(expected)
    assert "t7" not in found
    removed = Offsets({"a": QueueOffset(1)}).after({"a": None, "b": QueueOffset(2)})
    assert removed._layers == ({"b": 2},), "a removed topic leaves nothing behind"
    assert load(dump(state)) == state


def test_pages_are_small_and_hold_only_what_changed() -> None:
    many = {f"a topic with a longer name {n:05}": n for n in range(1_000)}
    published = checkpoint(1, 1, **many)
    parts = pages(ControlState(), published)
    assert len(parts) > 5
    sizes = [len(encode_command(page, nonce=(1 << 63) - 1)) for page in parts]
    assert max(sizes) <= COMMAND_SIZE_MAX
    state = after(*parts)
    assert state.checkpoint == published
    (page,) = pages(state, checkpoint(1, 2, **{**many, "new": 4}))
    assert page.checkpoint.queue_offsets == {"new": 4}


def test_topic_that_is_gone_leaves_the_shared_checkpoint() -> None:
    state = after(*pages(ControlState(), checkpoint(1, 1, a=1, b=2, c=3)))
    published = checkpoint(1, 2, b=2, c=4)
    (page,) = pages(state, published)
    assert page.checkpoint.queue_offsets == {"a": None, "c": 4}
    again = after(page, state=state)
    assert again.checkpoint == published
    assert again == after(page, state=again)
    assert pages(again, checkpoint(1, 3, b=2, c=4))[0].checkpoint.queue_offsets == {}


def test_checkpoint_without_changed_offsets_is_one_page() -> None:
    (page,) = pages(ControlState(), checkpoint(1, 1))
    assert page.checkpoint.queue_offsets == {}


def test_dumped_state_loads() -> None:
    for state in (
        ControlState(),
        after(INIT, appoint(3, 1, expected=0), CheckpointPage(checkpoint=checkpoint(3, 4, x=1))),
    ):
        assert load(dump(state)) == state


def test_unknown_version_and_op_are_ignored() -> None:
    state = after(INIT)
    for change in ({"v": 2}, {"op": "explode"}):
        fields = msgpack.unpackb(encode_command(appoint(1, 1, expected=0), nonce=NONCE))
        after_it = apply(state, msgpack.packb(fields | change))
        assert after_it == (state, AppliedCommand(NONCE, accepted=False))


@given(st.binary(max_size=64))
def test_junk_is_ignored(junk: bytes) -> None:
    state = ControlState()
    assert apply(state, junk)[0] is state


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 1 << 40)
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(
    st.sampled_from(
        [INIT, appoint(1, 1, expected=0), CheckpointPage(checkpoint=checkpoint(1, 1, x=1))]
    ),
    st.data(),
)
def test_command_with_one_field_of_another_type_never_raises(
    command: Command, data: st.DataObject
) -> None:
    fields = msgpack.unpackb(encode_command(command, nonce=NONCE))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    state, _ = apply(ControlState(), msgpack.packb(fields))
    assert load(dump(state)) == state


def test_proposed_voters_last_until_the_next_appointment_or_the_logs_word() -> None:
    wanted = {"a": ReplicaId(1), "c": ReplicaId(3)}
    proposed = replace(appoint(1, 1, expected=0), voters=wanted)
    state = after(INIT, proposed)
    assert (state.proposed, state.voters) == (wanted, INIT.voters)
    assert load(dump(state)) == state
    planned = after(INIT, replace(proposed, planned_from=(ReplicaId(1), ReplicaId(4))))
    of_init, of_log, new = (frozenset(map(ReplicaId, ids)) for ids in ((1, 2), (1, 4), (1, 3)))
    assert (state.change_of(of_init), state.change_of(of_log)) == (new, None)
    assert (planned.change_of(of_init), planned.change_of(of_log)) == (None, new)
    assert planned.change_of(new) == new  # the log has it already
    assert load(dump(planned)) == planned
    assert after(appoint(2, 1, expected=1), state=state).proposed is None
    said = Members(epoch=Epoch(1), voters=wanted)
    settled = after(said, state=state)
    assert (settled.proposed, settled.voters) == (None, wanted)
    assert after(said, state=settled) == settled
    assert not accepts(after(appoint(2, 1, expected=1), state=settled), said)


def test_state_of_an_earlier_program_is_read() -> None:
    state = after(INIT, appoint(1, 1, expected=0))
    assert load(msgpack.packb(msgpack.unpackb(dump(state))[:-1])) == state


def test_level_rises_with_an_appointment_and_never_falls() -> None:
    first = replace(appoint(1, 1, expected=0), level=2)
    state = after(INIT, first, appoint(2, 2, expected=1))
    assert (state.epoch, state.level) == (2, 2)
    assert load(dump(state)) == state


def test_state_and_commands_of_level_1_are_those_of_version_0_1() -> None:
    state = after(INIT, appoint(1, 1, expected=0))
    assert len(msgpack.unpackb(dump(state))) == 9
    assert "level" not in msgpack.unpackb(encode_command(appoint(2, 2, expected=1), nonce=NONCE))
