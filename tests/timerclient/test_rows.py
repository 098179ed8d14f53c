"""What callers may pass, and how it travels."""

import array
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest

from timer.model import columns, timer_id
from timerclient.client.timer_calls import raw_ids
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.values import ids
from timerclient.values.errors import InvalidRequest

THREE_MS = [10**12 + 5, 10**12 + 6, 10**12 + 7]


def batch(payloads: Any, **more: Any) -> pb.TimerColumns:
    keys, headers = more.pop("keys", None), more.pop("headers", None)
    body, n = rows.encode_batch("orders", payloads, more, keys, headers)
    [parsed] = pb.ScheduleRequest.FromString(body).timers
    assert len(parsed.payload_sizes) == n
    return parsed


@pytest.mark.parametrize(
    ("when", "way", "value"),
    [
        ({}, "delay_ms", 0),
        ({"delay": None}, "delay_ms", 0),
        ({"delay": timedelta(minutes=30)}, "delay_ms", 1_800_000),
        ({"delay": timedelta(microseconds=1)}, "delay_ms", 1),
        ({"delay": 2}, "delay_ms", 2_000),
        ({"delay": 0.3}, "delay_ms", 300),
        ({"delay": 1.0004}, "delay_ms", 1_001),
        ({"delay": 0.1 + 0.2}, "delay_ms", 300),
        ({"delay": rows.DUE_MS_MAX / 1000}, "delay_ms", rows.DUE_MS_MAX),
        ({"delay": np.timedelta64(1, "m")}, "delay_ms", 60_000),
        ({"delay": np.timedelta64(5_000_000_001, "ns")}, "delay_ms", 5_001),
        ({"delay_level": 3}, "delay_level", 3),
        ({"delay_level": np.int64(0)}, "delay_level", 0),
        ({"due_ms": 10**10}, "due_ms", 10**10),
        ({"due_ms": np.int64(10**12)}, "due_ms", 10**12),
        ({"due_ms": rows.DUE_MS_MAX}, "due_ms", rows.DUE_MS_MAX),
        ({"due": datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)}, "due_ms", 10**12),
        ({"due": datetime(1971, 2, 1, tzinfo=UTC)}, "due_ms", 396 * 86_400_000),
        (
            {"due": datetime(2001, 9, 9, 2, 46, 40, 1, timezone(timedelta(hours=1)))},
            "due_ms",
            10**12 + 1,
        ),
    ],
)
def test_when_is_one_number_of_milliseconds_never_early_or_a_level(
    when: dict[str, Any], way: str, value: int
) -> None:
    moment = rows.moment(when)
    assert (moment.way, list(moment.values)) == (way, [value])


@pytest.mark.parametrize(
    ("when", "text"),
    [
        ({"due": datetime(2030, 1, 1)}, "naive"),  # noqa: DTZ001
        ({"delay": 1, "due_ms": 1}, "only one"),
        ({"delay": -1}, "must be 0 to"),
        ({"delay": -0.0001}, "must be 0 to"),
        ({"delay": timedelta(microseconds=-1)}, "must be 0 to"),
        ({"delay": float("nan")}, "must be 0 to"),
        ({"delay": float("inf")}, "must be 0 to"),
        ({"delay": "1s"}, "number of seconds"),
        ({"delay": b"5"}, "number of seconds"),
        ({"delay": ""}, "number of seconds"),
        ({"delay": True}, "number of seconds"),
        ({"due_ms": True}, "whole number"),
        ({"delay": [1]}, "number of seconds"),
        ({"due_ms": 1.5}, "whole number"),
        ({"due_ms": -1}, "must be 10000000000"),
        ({"due_ms": 0}, "^due_ms = 0: must be 10000000000 to .* a delay of 0 means at once"),
        ({"due_ms": 10**10 - 1}, "in Unix milliseconds, not seconds"),
        ({"due": datetime(1960, 1, 1, tzinfo=UTC)}, "^due = 1960-01-01T00:00:00.00:00: must be 1"),
        ({"due": datetime(1970, 1, 1, tzinfo=UTC)}, "a delay of 0 means at once"),
        ({"delay_level": 10**5_000}, "^delay_level = <int>: must be 0 to"),
        ({"due_ms": rows.DUE_MS_MAX + 1}, f"to {rows.DUE_MS_MAX}"),
        ({"due_ms": 1_795_824_060}, "in Unix milliseconds, not seconds"),
        ({"due": 17}, "aware datetime"),
        ({"due": datetime(1970, 1, 21, tzinfo=UTC)}, "in Unix milliseconds, not seconds"),
        ({"delay": np.timedelta64(1, "M")}, r"delay = 1 of timedelta64\[M\]: must be a timedelta"),
        ({"delay": np.timedelta64("NaT", "s")}, "delay = NaT: must be a timedelta"),
        ({"delay": np.datetime64(5, "ns")}, r"5 of datetime64\[ns\]: must be a timedelta"),
        ({"due_ms": np.timedelta64(5, "ns")}, r"5 of timedelta64\[ns\]: must be a whole number"),
        ({"due": np.datetime64("2030-01-01T00:00:00", "s")}, "naive"),
        (
            {"due": np.datetime64("2030-01-01", "ns")},
            r"datetime64\[ns\]: must be an aware datetime",
        ),
        ({"due": pd.NaT}, "due = NaT: must be an aware datetime"),
    ],
)
def test_when_that_names_no_instant_is_refused(when: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        rows.moment(when)


def test_misspelt_when_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="dealy"):
        rows.moment({"dealy": 1})


@pytest.mark.parametrize(
    "due",
    [
        THREE_MS,
        (*THREE_MS,),
        array.array("q", THREE_MS),
        np.array(THREE_MS),
        np.array(THREE_MS, np.uint64),
    ],
)
def test_batch_takes_due_times_as_list_tuple_or_array(due: Any) -> None:
    assert list(batch([b"a", b"bb", b""], due_ms=due).due_ms) == THREE_MS


def test_batch_takes_delays_of_numpy_and_pandas_in_any_unit() -> None:
    delays = np.array([5_000_000_001, 7], "m8[ns]")
    later = delays.astype("m8[s]") + np.timedelta64(1, "ns")
    for given in (delays, pd.Series(delays), later):
        assert list(batch([b"a", b"b"], delay=given).delay_ms) == [5_001, 1]
    tensor = SimpleNamespace(dtype="torch.float32", tolist=lambda: [5.5, 1.0])  # has no `kind`
    assert list(batch([b"a", b"b"], delay=tensor).delay_ms) == [5_500, 1_000]


def test_batch_takes_one_due_time_for_all() -> None:
    parsed = batch([b"a", b"bb", b""], delay=timedelta(seconds=1))
    assert list(parsed.delay_ms) == [1000]
    assert list(parsed.payload_sizes) == [1, 2, 0]
    assert parsed.payloads == b"abb"


def test_batch_takes_a_table_of_bytes_and_wide_views() -> None:
    table = batch(np.arange(6, dtype=np.uint8).reshape(3, 2))
    assert (list(table.payload_sizes), table.payloads) == ([2, 2, 2], bytes(range(6)))
    views = batch([memoryview(array.array("I", [1, 2])), bytearray(b"x")])
    assert list(views.payload_sizes) == [8, 1]


@pytest.mark.parametrize(
    ("payloads", "more", "text"),
    [
        ([], {}, "at least one"),
        (b"abc", {}, "sequence of bytes"),
        (["text"], {}, "must be bytes"),
        ([b"a", b"b"], {"due_ms": THREE_MS}, "a list of 3"),
        ([b"a", b"b"], {"delay": [1]}, "delay = 'a list of 1': must have 2, one for each"),
        ([b"a", b"b"], {"delay": b"12"}, "number of seconds"),
        ([b"a", b"b"], {"delay": {1: 2, 3: 4}}, "number of seconds"),
        ([b"a", b"b"], {"delay": {1, 3}}, "number of seconds"),
        ([b"a", b"b"], {"due_ms": [10**12, 0]}, r"^due_ms\[1\] = 0: must be 1"),
        ([b"a", b"b"], {"due_ms": [10**12, 1.5]}, "whole number"),
        ([b"a", b"b"], {"due_ms": [1_795_824_060_000, 1_795_824_060]}, "Unix milliseconds"),
        ([b"a", b"b"], {"keys": ["k"]}, "keys"),
        ([b"a", b"b"], {"headers": [{}]}, "headers"),
        ([b"a"], {"headers": {"n": 1}}, r"^headers\.n = 1: must be str"),
        ([b"a"], {"headers": ["n"]}, "mapping of str"),
        ([b"a"], {"headers": {"": "x"}}, "not be empty"),
        ([b"a"], {"headers": {"n": "x" * 70_000}}, "65535"),
    ],
)
def test_batch_of_unequal_or_wrong_columns_is_refused(
    payloads: Any, more: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        batch(payloads, **more)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"payloads": [b"a", b"b", "c"]}, "payload[2] = str of 1: must be bytes"),
        ({"delay": [1, 2, -3]}, "delay[2] = -3: must be 0 to"),
        ({"due_ms": [10**12, 10**12, 10**9]}, "due_ms[2] = 1000000000: must be 1000000000"),
        ({"delay": np.array([1, 2, "NaT"], "m8[ns]")}, "delay[2] = NaT: must be a timedelta"),
        ({"due": [*[datetime.now(UTC)] * 2, pd.NaT]}, "due[2] = NaT: must be an aware datetime"),
        ({"keys": ["a", None, 5]}, "keys[2] = 5: must be str"),
        ({"ordering_keys": ["a", None, 5]}, "ordering_keys[2] = 5: must be str"),
        ({"priorities": [0, None, 10]}, "priority[2] = 10: must be 0 to 9"),
        ({"headers": [{}, None, {"n": 1}]}, "headers[2].n = 1: must be str"),
    ],
)
def test_wrong_row_of_a_batch_is_named(more: dict[str, Any], text: str) -> None:
    columns = {name: more.pop(name) for name in more.keys() - {"delay", "due", "due_ms"}}
    given = {"payloads": [b"a", b"b", b"c"], "keys": None, "headers": None} | columns
    with pytest.raises(InvalidRequest) as refused:
        rows.encode_batch("orders", when=more, **given)
    assert str(refused.value).startswith(text)
    assert refused.value.field == text.split()[0]


@pytest.mark.parametrize("value", ["2030-01-01", date(2030, 1, 1), 1.5, None])
def test_time_of_another_type_names_both_that_are_taken(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="an aware datetime, or Unix milliseconds"):
        rows.instant_ms("start", value)


def test_batch_over_the_message_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        batch([bytes(rows.REQUEST_SIZE_MAX)])


def test_keys_and_headers_travel_per_row_or_not_at_all() -> None:
    parsed = batch([b"a", b"b"], keys=["k", None], headers=[None, {"n": "wert ä"}])
    assert (list(parsed.key_sizes), parsed.keys) == ([1, 0], b"k")
    assert parsed.headers_sizes[0] == 0
    assert columns.decode_headers(parsed.headers) == {"n": "wert ä"}
    bare = batch([b"a"], keys=[None], headers=[{}])
    assert not bare.key_sizes
    assert not bare.headers_sizes


def test_headers_have_the_servers_form() -> None:
    headers = {"a": "1", "ü": "", "b": "x"}
    assert rows.encode_headers(headers) == columns.encode_headers(headers)
    assert rows.decode_headers(columns.encode_headers(headers)) == headers


def test_ids_have_the_servers_form() -> None:
    raw = timer_id.encode(np.array([1_700_000_000_123]), np.array([42], np.uint64), salt=7)
    assert ids.to_text(raw) == timer_id.to_text(raw)
    assert ids.from_text(timer_id.to_text(raw)) == raw
    assert ids.due_ms_of(raw) == 1_700_000_000_123


@pytest.mark.parametrize("text", ["", "x" * 24, "0" * 23, "ä" * 24, "0" * 32])
def test_id_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="24 characters"):
        ids.from_text(text)


def test_client_needs_nothing_but_grpc_and_protobuf() -> None:
    code = (
        "import sys; import timerclient, timerclient.cli.timerctl; "
        "bad = {'numpy', 'timer', 'replication', 'cluster', 'pyarrow'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_id_in_place_of_several_is_refused() -> None:
    for one in ("0" * 24, bytes(15)):
        with pytest.raises(InvalidRequest, match="must be a sequence of timers"):
            raw_ids(one)  # type: ignore[arg-type]
