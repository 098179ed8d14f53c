"""timerctl: errors in the words of the command line."""

import argparse
import json
import logging

import pytest

from tests.timerclient.conftest import Ctl, Threaded
from tests.timerclient.fake_cluster import wire_error
from timerclient.cli import cli_args, cli_errors, contexts, timerctl
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Message
from timerclient.values.client_events import Event, LeaderMissing, LeasesLost

ID = "0" * 24


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("schedule", "t", "p", "--dely", "5s"), "--dely 5s; did you mean --delay?"),
        (("schedule", "t", "p", "--delay", "-5s"), "--delay: '-5s' must not be negative"),
        (("stats",), "did you mean status?"),
        (("--nosuch",), "unrecognized arguments: --nosuch"),
        (("schedule", "--dely=5s"), "--dely=5s; did you mean --delay?"),
        (("schedule", "t"), "required: PAYLOAD"),
        (("schedule", "t", "p", "--key", ""), "--key: must not be empty"),
        (("schedule", "t", "p", "--request-id", ""), "--request-id: must not be empty"),
    ],
)
def test_wrong_command_line_is_two_lines_about_the_command(
    ctl: Ctl, argv: tuple[str, ...], text: str
) -> None:
    code, out, err = ctl(*argv)
    reason, help_, rest = err.split("\n")
    assert (code, out, rest) == (2, "", "")
    assert text in reason
    command = "timerctl schedule" if argv[0] == "schedule" else "timerctl"
    assert help_ == f"see: {command} --help"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("status", "--endpoints", "127.0.0.1"), "--endpoints = '127.0.0.1': must be host:port"),
        (("groups", "create", "t", "g", "--lease", "13h"), "--lease = 13h: must be 1ms to 12h"),
        (("recurring", "create", "t", "", "p", "--every", "9s"), "KEY = '': must not be empty"),
        (("schedule", "t", "p", "--due-ms", "0"), "--due-ms = 0: must be 10000000000 to "),
        (
            ("cancel", "order-4711"),
            "ID = 'order-4711': must be 24 characters of 0-9, a-v. By key: timerctl cancel ",
        ),
        (("schedule", "t", "p", "--priority", "10"), "--priority = 10: must be 0 to 9"),
        (
            ("groups", "create", "t", "g", "--backoff-min", "99d"),
            "--backoff-min = 99d: must be 0s to 30d",
        ),
        (("timers", "story", "k"), "ID = 'k': must be 24 characters of 0-9, a-v. By key: "),
        (
            ("schedule", "t", "p", "--due", "1960-01-01T00:00:00Z"),
            "--due = 1960-01-01T00:00:00+00:00: must be 1970-04-26T17:46:40.000Z to ",
        ),
        (
            ("groups", "seek", "t", "g", "--time", "1960-01-01T00:00:00Z", "--yes"),
            "--time = 1960-01-01T00:00:00+00:00: must be in 1970 or later",
        ),
        (
            ("timers", "list", "t", "--from", "1700000000"),
            "--from = 1700000000: must be Unix milliseconds; ",
        ),
        (("deadletters", "redrive", "t", "--limit", "-1"), "--limit = -1: must be "),
        (("schedule", "t", "p", "--timeout", "0s"), "--timeout = 0s: must be "),
    ],
)
def test_wrong_value_is_named_by_its_option(ctl: Ctl, argv: tuple[str, ...], text: str) -> None:
    code, _, err = ctl(*argv)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"timerctl: {text}")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("count", "did you mean timers count?"),
        ("schedul", "invalid choice: 'schedul'; did you mean schedule? (choose from "),
        ("timers describe", "did you mean get?"),
        ("policies get", "did you mean show?"),
        ("cancel --key k", "timerctl: --key needs --topic"),
        (
            "schedule orders p --due tomorrow",
            "not an ISO 8601 time, such as 2030-01-01T09:00:00+01",
        ),
        ("timers", "required: COMMAND: get, list, count, story, cancel, reschedule"),
        ("consume t --group g --lease 0ms", "--lease: '0ms' must be longer than 0"),
        (f"timers get {ID} --topic t --key k", "give ID, or --topic and --key"),
        (f"timers story {ID} --topic nosuch", "give ID, or --topic and --key"),
        ("policies set --topic t ttl_ms=-1", "ttl_ms = '-1': must not be negative"),
        ("policies set --topic t ttl=1h", "'ttl' is not a field; did you mean ttl_ms? fields: "),
        ("policies set --topic t pending_max=-1", "pending_max = '-1': must not be negative"),
        ("deadletters redrive t.g.dead --offset -1", "--offset = -1: must be 0 or more"),
        ("recurring create t k --every 9s --preview 101", "--preview = 101: must be 1 to 100"),
    ],
)
def test_wrong_command_line_names_the_right_one(ctl: Ctl, line: str, hint: str) -> None:
    code, _, err = ctl(*line.split())
    assert code == 2
    assert hint in err.split("\n")[0]


def test_commands_that_are_hinted_at_exist(ctl: Ctl) -> None:
    for words in cli_args.FULL_COMMANDS.values():
        assert ctl(*words.split(), "--help")[0] == 0


def test_value_that_the_cluster_rejects_is_named_by_its_option(
    ctl: Ctl, threaded: Threaded
) -> None:
    refused = wire_error(
        *(pb.REASON_INVALID_REQUEST, "delay_ms = 5000: must be at most 1"),
        field="delay_ms",
        limit="must be at most 1",
    )
    threaded.cluster.on_schedule = lambda _: refused
    code, _, err = ctl("schedule", "orders", "p", "--delay", "5s")
    assert (code, err) == (2, "timerctl: --delay = 5s: must be at most 1ms\n")
    refused.field, refused.limit = "due_ms", "must be at most 1767225600000"
    code, _, err = ctl("schedule", "orders", "p", "--due", "2030-01-01T00:00:00Z")
    limit = "must be at most 2026-01-01T00:00:00.000Z"
    assert (code, err) == (2, f"timerctl: --due = 2030-01-01T00:00:00+00:00: {limit}\n")
    refused.field, refused.limit = "delay_ms", "must be at most 1"
    code, _, err = ctl("schedule", "orders", "p")  # no option gave the value
    assert (code, err) == (2, "timerctl: delay_ms = 5000: must be at most 1\n")


@pytest.mark.parametrize("is_default", [True, False])
def test_unreachable_default_addresses_are_named_as_such(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, *, is_default: bool
) -> None:
    nobody = "127.0.0.1:1"
    for module in (contexts, cli_errors) if is_default else (contexts,):
        monkeypatch.setattr(module, "DEFAULT_ENDPOINTS", nobody)
    monkeypatch.delenv("TIMERCTL_ENDPOINTS")
    for command in (("status",), ("cancel", ID)):
        code, _, err = ctl(*command, "--timeout", "2s")
        assert (code, err.count("\n")) == (3, 1)
        assert ("set --endpoints or TIMERCTL_ENDPOINTS" in err) is is_default
        assert f"last error: {nobody}: UNAVAILABLE: Connection refused" in err


def test_nodes_without_a_leader_are_counted_and_not_taken_for_unreachable(
    ctl: Ctl, threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = f"{threaded.cluster.nodes[0].address},127.0.0.1:1"
    for module in (contexts, cli_errors):
        monkeypatch.setattr(module, "DEFAULT_ENDPOINTS", endpoints)
    monkeypatch.delenv("TIMERCTL_ENDPOINTS")
    threaded.cluster.leader = None
    for command in (("schedule", "orders", "p"), ("cancel", ID)):
        code, _, err = ctl(*command, "--timeout", "4s")
        assert (code, "set --endpoints" in err) == (3, False)
        assert "1 of 2 nodes answers, none leads; " in err
        assert err.endswith("; see: timerctl status\n")


def test_missing_leader_is_told_once(ctl: Ctl, caplog: pytest.LogCaptureFixture) -> None:
    code, _, _ = ctl("cancel", ID, "--endpoints", "127.0.0.1:1", "--timeout", "2.5s")
    assert code == 3
    assert [r.getMessage()[:30] for r in caplog.records] == ["unreachable: no leader for 1 s"]
    caplog.clear()
    json_ = ctl("cancel", ID, "--endpoints", "127.0.0.1:1", "--timeout", "2.5s", "-o", "json")
    assert (json.loads(json_[2])["error"]["exit_code"], caplog.records) == (3, [])


def test_reasons_in_json_have_one_spelling(ctl: Ctl) -> None:
    unreachable = ("status", "--endpoints", "127.0.0.1:1", "--timeout", "100ms")
    for argv, reason in (
        (unreachable, "UNREACHABLE"),
        (("transfer", "nobody"), "NOT_FOUND"),
        (("cancel", "x"), "INVALID_REQUEST"),
        (("nonsense",), "USAGE"),
        (("consume", "t", "--group", "g", "--count", "1", "--idle", "1ms"), "TOO_FEW"),
    ):
        error = json.loads(ctl(*argv, "-o", "json")[2])["error"]
        assert error["reason"] == reason


def test_schedule_and_consume_print_the_same_due_time(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = json.loads(
        ctl("schedule", "orders", "p", "--due-ms", f"{10**12 + 17}", "-o", "json")[1]
    )
    monkeypatch.setattr(Message, "due_ms", 10**12)  # as requested
    consume = ("consume", "orders", "--count", "1", "--no-ack", "--group")
    consumed = json.loads(ctl(*consume, "g", "-o", "json")[1])
    assert scheduled["due_ms"] == consumed["due_ms"] == 10**12 + 17
    assert consumed["requested_ms"] == 10**12
    assert "  due 2001-09-09T01:46:40.017Z  " in ctl(*consume, "h")[1]


def test_confirmation_without_a_terminal_is_a_wrong_command_line(ctl: Ctl) -> None:
    code, _, err = ctl("topics", "delete", "orders")
    text = "delete topic orders needs --yes without a terminal; nothing was changed"
    assert (code, err) == (2, f"timerctl: {text}\n")
    with pytest.raises(cli_args.UsageError):
        cli_args.confirm(argparse.Namespace(yes=False), "x", "y")


def test_row_of_a_table_has_a_cell_for_each_heading_in_columns_that_are_not_shown_too() -> None:
    args = argparse.Namespace(output="table", color="never")
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        cli_args.table(args, ("A", "WIDE", "B"), [("a", "wide", "more", "b")], ("WIDE",))


@pytest.mark.parametrize(
    "event", [LeaderMissing(1.0, "none answers"), LeasesLost("orders", "billing", (1,))]
)
def test_events_of_the_client_are_logged_except_with_json(event: Event) -> None:
    record = logging.LogRecord("timerclient", logging.WARNING, "", 0, "%s", (event,), None)
    assert [timerctl._is_logged(record, is_json=json) for json in (True, False)] == [False, True]
