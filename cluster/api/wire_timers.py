"""Conversions of requests for existing timers: targets, filters, page tokens, columns.

As in cluster/api/wire_rows.py, all client input is checked here before anything takes effect.

A page token is opaque to clients. It holds the end of the last page, and the end of the set that a
change by filter changes. It is valid for one cluster and one filter, and refused elsewhere.

    0   8  check     hash of the rest, the filter and the cluster's salt
    8   8  due_ms    i64
    16  8  seq       u64; the next page begins after (due_ms, seq)
    24  8  seq_end   u64; a change by filter leaves timers from this seq on unchanged
"""

import hashlib
import struct
from collections.abc import Mapping
from typing import Final

import numpy as np

from cluster.api import wire_rows
from timer.entries.payloads import Ids, Keys
from timer.leader.leader import CANCEL_ROWS_MAX, KEYS_MAX
from timer.model import timer_id
from timer.model.columns import Binary, gather
from timer.model.firing_order import Position
from timer.model.timer_errors import InvalidRequestError
from timer.model.timer_id import SEQ_MAX
from timer.model.units import DUE_MS_MAX, TopicId
from timer.pending.read_view import Filter
from timer.pending.runs.row_reader import WholeRows
from timer.ready.topic import Topic
from timerclient.proto import timer_pb2 as pb

PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 1_000

_TOKEN: Final = struct.Struct("<8sqQQ")


def check_one_target(request: pb.CancelRequest | pb.RescheduleRequest) -> str:
    """Return the given field: timer_ids, keys or filter.

    Raises:
        InvalidRequestError: none or several are given, or a page token without a filter.
    """
    given = ["timer_ids"] if request.timer_ids else []
    given += [name for name in ("keys", "filter") if request.HasField(name)]
    if len(given) != 1:
        limit = "exactly one must be given"
        raise InvalidRequestError("timer_ids, keys, filter", ", ".join(given) or "none", limit)
    if request.page_token and given != ["filter"]:
        raise InvalidRequestError("page_token", f"with {given[0]}", "allowed only with a filter")
    return given[0]


def ids_of(raw: bytes, salt: int) -> tuple[Ids, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return the timers of raw ids, and whether each id is genuine (n, bool).

    Raises:
        InvalidRequestError: no ids, too many, or an incomplete one.
    """
    due_ms, seq, genuine = wire_rows.timers_of(raw, CANCEL_ROWS_MAX, salt)
    return Ids(due_ms, seq), genuine


def keys_of(keys: pb.TimerKeys, topics: Mapping[str, Topic], bytes_max: int) -> Keys:
    """Return the topic and keys of timers.

    Raises:
        InvalidRequestError: a key is out of its limits or given twice, or there are too many.
        NotFoundError: the topic does not exist.
    """
    n = len(keys.key_sizes)
    if not 1 <= n <= KEYS_MAX:
        raise InvalidRequestError(
            "key_sizes", f"{n} values", f"a request holds 1 to {KEYS_MAX} keys"
        )
    topic = wire_rows.topic_of(topics, keys.topic).topic_id
    try:
        column = wire_rows.checked_keys(keys.key_sizes, keys.keys, n, bytes_max)
    except InvalidRequestError as error:
        raise error.in_request(0, n) from None
    if not column.sizes.all():
        raise InvalidRequestError("keys", "an empty key", "must have 1 byte or more")
    different = len({*column.values()})
    if different < n:
        raise InvalidRequestError("keys", f"{n}, {different} different", "no key may be repeated")
    return Keys(np.full(n, topic, np.uint32), column)


def filter_of(
    what: pb.TimerFilter, topics: Mapping[str, Topic], bytes_max: int, seq_end: int = SEQ_MAX
) -> Filter:
    """Return the checked form of a filter. `seq_end`: end of the seqs that it matches, exclusive.

    Raises:
        InvalidRequestError: a field is out of its limits.
        NotFoundError: the topic does not exist.
    """
    topic = wire_rows.topic_of(topics, what.topic).topic_id
    end = what.due_to_ms or DUE_MS_MAX + 1
    for name, value in (("due_from_ms", what.due_from_ms), ("due_to_ms", end)):
        wire_rows.check_bound(f"filter.{name}", value, DUE_MS_MAX + 1)
    if end <= what.due_from_ms:
        limit = f"must be after due_from_ms = {what.due_from_ms}"
        raise InvalidRequestError("filter.due_to_ms", what.due_to_ms, limit)
    prefix = what.key_prefix.encode()
    if len(prefix) > bytes_max:
        limit = f"must have at most {bytes_max} bytes"
        raise InvalidRequestError("filter.key_prefix", f"{len(prefix)} bytes", limit)
    return Filter(
        topic=topic,
        due_from_ms=what.due_from_ms,
        due_to_ms=end,
        key_prefix=prefix,
        seq_end=seq_end,
    )


def page_token(what: pb.TimerFilter, after: Position, seq_end: int, salt: int) -> bytes:
    """Return the token of the page that begins after the position `after`."""
    return _TOKEN.pack(_check(what, after, seq_end, salt), after.due_ms, after.seq, seq_end)


def read_page_token(token: bytes, what: pb.TimerFilter, salt: int) -> tuple[Position, int]:
    """Return (position after which the page begins, seq_end) of a token.

    Raises:
        InvalidRequestError: the token is malformed, or of another filter or cluster.
    """
    if len(token) == _TOKEN.size:
        check, due_ms, seq, seq_end = _TOKEN.unpack(token)
        if check == _check(what, Position(due_ms, seq), seq_end, salt):
            return Position(due_ms, seq), seq_end
    limit = "must be the token of an answer to the same filter"
    raise InvalidRequestError("page_token", token[:8].hex() + "…", limit)


def _check(what: pb.TimerFilter, after: Position, seq_end: int, salt: int) -> bytes:
    text = repr((salt, *after, seq_end, what.SerializeToString(deterministic=True)))
    return hashlib.sha256(text.encode()).digest()[:8]


def pending_of(timers: WholeRows, salt: int) -> pb.PendingTimers:
    """Return pending timers as columns."""
    rows = timers.rows
    out = pb.PendingTimers(timer_ids=timer_id.encode(rows["due_ms"], rows["seq"], salt))
    out.due_ms.extend(rows["requested_ms"].tolist())
    wire_rows.put_bytes(out, *(gather(rows, {0: timers.blob}, name) for name in wire_rows.BYTES))
    return out


def one_key(topic: TopicId, key: str, bytes_max: int) -> Keys:
    """Return the topic and key of one timer.

    Raises:
        InvalidRequestError: the key is empty or too long.
    """
    data = key.encode()
    if not 1 <= len(data) <= bytes_max:
        raise InvalidRequestError("key", f"{len(data)} bytes", f"must have 1 to {bytes_max} bytes")
    return Keys(np.array([topic], np.uint32), Binary.of([data]))
