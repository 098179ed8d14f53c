"""Ordering keys and priorities of rows: their bytes, and what a queue knows of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from timer.model.columns import (
    Binary,
    Part,
    decode_headers,
    decode_schedule,
    encode_headers,
    encode_schedule,
    gather,
)
from timer.model.row_traits import (
    PRIORITY_DEFAULT,
    Traits,
    join,
    kinds_of,
    ordering_keys,
    priorities,
    split,
)
from timer.model.units import ProducerId, UnixMs
from timer.pending.memory.key_index import PLAIN_HASHER
from timer.ready.queue import Queue

ROWS = st.lists(
    st.tuples(
        st.dictionaries(st.text(min_size=1, max_size=3), st.text(max_size=300), max_size=2),
        st.text(max_size=9).map(str.encode),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=9,
)


def part_with(headers: Binary | None, n: int, key: list[bytes] | None = None) -> Part:
    return Part(
        producer_id=ProducerId(0),
        sequence=0,
        due_ms=np.arange(n, dtype=np.int64),
        requested_ms=np.arange(n, dtype=np.int64),
        topic=np.ones(n, np.uint32),
        payload=Binary.of([b"x"] * n),
        key=Binary.of(key) if key else None,
        headers=headers,
    )


@settings(deadline=None)
@given(ROWS)
def test_traits_go_through_an_entry_and_leave_the_other_headers_as_they_are(
    rows: list[tuple[dict[str, str], bytes, int]],
) -> None:
    headers = Binary.of([encode_headers(texts) for texts, _, _ in rows])
    keys, levels = [key for _, key, _ in rows], [level for *_, level in rows]
    joined = join(headers, Traits(Binary.of(keys), np.array(levels, np.uint8)))
    payload = memoryview(b"".join(encode_schedule([part_with(joined, len(rows))])))
    found, bufs = decode_schedule(payload).rows, {0: payload}
    assert priorities(found, bufs).tolist() == levels
    places, ordering = ordering_keys(found, bufs)
    assert dict(zip(places.tolist(), ordering.values(), strict=True)) == {
        at: key for at, key in enumerate(keys) if key
    }
    apart = found.copy()  # each row in a buffer of its own
    apart["buf"] = np.arange(len(rows))
    own = dict.fromkeys(range(len(rows)), payload)
    assert priorities(apart, own).tolist() == levels
    assert ordering_keys(apart, own)[1].blob == ordering.blob
    assert kinds_of(found, bufs) == (any(keys), any(each != PRIORITY_DEFAULT for each in levels))
    rest, traits = split(gather(found, bufs, "headers"))
    assert rest.values() == headers.values()
    if traits is None:
        assert not any(keys)
        assert set(levels) == {PRIORITY_DEFAULT}
    else:
        assert traits.ordering.values() == keys
        assert traits.priority.tolist() == levels


@settings(deadline=None)
@given(st.lists(st.binary(max_size=9), min_size=1))
def test_headers_of_other_forms_have_no_traits_and_break_nothing(texts: list[bytes]) -> None:
    column = Binary.of(texts)
    rest, traits = split(column)
    if traits is None:
        assert rest is column
    else:
        assert len(rest.sizes) == len(texts)
        assert int(traits.priority.max()) <= 9


def test_letter_of_a_row_with_traits_keeps_them() -> None:
    traits = Traits(Binary.of([b"k"]), np.array([7], np.uint8))
    [data] = join(Binary.of([encode_headers({"a": "b"})]), traits).values()
    texts = decode_headers(data) | {"reason": "nacked"}
    rest, kept = split(Binary.of([encode_headers(texts)]))
    assert rest.values() == [encode_headers({"a": "b", "reason": "nacked"})]
    assert kept is not None
    assert kept.ordering.values() == [b"k"]
    assert kept.priority.tolist() == [7]


def add(queue: Queue, part: Part) -> None:
    payload = memoryview(b"".join(encode_schedule([part])))
    rows = decode_schedule(payload).rows
    rows["seq"] = np.arange(len(rows)) + int(queue.end) + 1
    queue.append(rows, {0: payload}, UnixMs(5))


def test_queue_hashes_the_ordering_key_in_place_of_the_key_until_it_is_empty() -> None:
    ordering = Traits(Binary.of([b"o", b"o", b"", b""]), np.full(4, PRIORITY_DEFAULT, np.uint8))
    headers = join(Binary.of([b""] * 4), ordering)
    parts = [part_with(headers, 4, [b"a", b"b", b"o", b""]), part_with(None, 2, [b"o", b"o"])]
    queue = Queue()
    add(queue, parts[0])
    add(queue, parts[1])
    hashes = queue.key_hashes(np.arange(6, dtype=np.uint64)).tolist()
    assert queue.has_ordering_keys
    assert not queue.has_priorities
    wanted = int(PLAIN_HASHER(np.ones(1, np.uint32), Binary.of([b"o"]))[0])
    assert [each == wanted for each in hashes] == [True, True, True, False, True, True]
    queue.drop_below(queue.end)
    add(queue, parts[1])
    assert not queue.has_ordering_keys
