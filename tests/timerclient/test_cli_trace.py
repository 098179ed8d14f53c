"""`timerctl trace`: the hops of a call are picked from the records of the nodes."""

from timerclient.cli.cli_trace import NodeStamps, Span, hops_of, medians

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
