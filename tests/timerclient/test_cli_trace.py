"""`timerctl trace`: the hops of a call are picked from the records of the nodes."""

import time
from typing import Any, cast

import pytest

from timerclient.cli.cli_trace import (
    CALLS_MAX,
    NodeStamps,
    Span,
    _calls,
    _own_boot_id,
    _stamps_of,
    hops_of,
    medians,
)
from timerclient.cli.timerctl import main
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import Unreachable

LEADER = NodeStamps(
    "n1",
    [
        ("REQUEST", 6, 1_000),  # of another call, before this one
        ("APPENDED", 7, 13_000),
        ("SENT", 7, 14_000),
        ("SENT", 7, 15_000),
        ("WRITING", 6, 16_000),
        ("WRITING", 8, 17_000),  # a batch with the entry after it
        ("ANSWERED", 7, 30_000),
        ("COMMITTED", 7, 31_000),
        ("REQUEST", 7, 12_000),
        ("APPLIED", 7, 32_000),
        ("REQUEST", 9, 18_000),
    ],
)
FOLLOWER = NodeStamps("n2", [("COMMITTED", 7, 45_000), ("RECEIVED", 7, 20_000)])


def test_a_call_has_the_first_stamp_of_each_hop_that_includes_its_entry() -> None:
    hops = hops_of(Span(10_000, 40_000), [FOLLOWER, LEADER])
    assert [(hop.node, hop.at_us) for hop in hops] == [
        *(("caller", 0.0), ("n1", 2.0), ("n1", 3.0), ("n1", 4.0), ("n1", 7.0)),
        *(("n2", 10.0), ("n1", 20.0), ("n1", 21.0), ("n1", 22.0), ("caller", 30.0)),
    ]


def test_a_call_whose_request_is_in_no_record_has_no_hops() -> None:
    assert not hops_of(Span(18_001, 40_000), [LEADER, FOLLOWER])
    assert not hops_of(Span(2_000, 11_000), [LEADER, FOLLOWER])


def test_medians_leave_out_hops_that_half_of_the_calls_lack() -> None:
    calls = [hops_of(Span(10_000, ended), [LEADER, FOLLOWER]) for ended in (40_000, 50_000)]
    calls[1] = [hop for hop in calls[1] if hop.node != "n2"]
    found = medians([*calls, []])
    assert found[-1].at_us == 35.0
    assert {hop.node for hop in found} == {"caller", "n1"}


@pytest.mark.parametrize("ahead_ns", [10**15, -1_000])
def test_stamps_of_another_machine_are_moved_to_the_clock_of_the_caller(ahead_ns: int) -> None:
    assert _stamp_ns(ahead_ns, bytes(16)) == 0


def test_stamps_of_the_same_machine_are_not_moved() -> None:
    boot_id = _own_boot_id()
    assert boot_id is not None
    assert _stamp_ns(10**15, boot_id) == 10**15


def _stamp_ns(ahead_ns: int, boot_id: bytes) -> int:
    """Return by how much a stamp of now is ahead; 0: it lies within the call."""
    answered_ns = 0

    class Client:
        def trace_hops(self, node: str) -> pb.TraceHopsResponse:
            nonlocal answered_ns
            answered_ns = time.monotonic_ns()
            at_ns = max(0, answered_ns + ahead_ns)
            stamp = pb.HopStamp(hop=pb.HopStamp.HOP_SENT, index=7, at_ns=at_ns)
            return pb.TraceHopsResponse(stamps=[stamp], clock_ns=at_ns, boot_id=boot_id)

    began_ns = time.monotonic_ns()
    found = _stamps_of(cast("Any", Client()), "n2")
    [(hop, index, at_ns)] = found.stamps
    assert (found.node, hop, index) == ("n2", "SENT", 7)
    return 0 if began_ns <= at_ns <= time.monotonic_ns() else at_ns - answered_ns


@pytest.mark.parametrize("failure", [None, Unreachable("no answer")])
def test_an_interrupted_call_cancels_its_timer_or_names_it(
    failure: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduled, cancelled = list[str](), list[str]()

    class Client:
        def schedule(self, topic: str, payload: bytes, *, delay: object, key: str) -> None:
            del topic, payload, delay
            scheduled.append(key)
            raise KeyboardInterrupt

        def cancel(self, *, topic: str, key: str) -> None:
            assert topic == "probe"
            cancelled.append(key)
            if failure is not None:
                raise failure

    with pytest.raises(KeyboardInterrupt):
        _calls(cast("Any", Client()), "probe", 2)
    assert len(scheduled) == 1
    assert cancelled == scheduled
    remedy = f"timerctl cancel --topic probe --key {scheduled[0]}\n"
    told = capsys.readouterr().err
    assert told.endswith(remedy) if failure else not told


@pytest.mark.parametrize("calls", [0, CALLS_MAX + 1])
def test_the_number_of_calls_is_bounded(calls: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--endpoints", "127.0.0.1:1", "trace", "probe", "--calls", str(calls)]) != 0
    assert f"must be 1 to {CALLS_MAX}" in capsys.readouterr().err
