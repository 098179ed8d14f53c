"""`timerctl schedule --from`: lines of JSON, their errors, and a repeated command."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.settings.config import LimitsConfig
from tests.timerclient.conftest import Ctl, Threaded
from tests.timerclient.fake_cluster import wire_error
from timerclient.cli import cli_bulk, timerctl
from timerclient.proto import timer_pb2 as pb
from timerfake import FakeCluster


@pytest.fixture
def lines(tmp_path: Path) -> Any:
    """Write objects, or texts, as the lines of a file; return its path."""

    def write(*said: Any) -> str:
        path = tmp_path / "timers.ndjson"
        texts = [each if isinstance(each, str) else json.dumps(each) for each in said]
        path.write_text("".join(f"{text}\n" for text in texts))
        return str(path)

    return write


def test_each_line_is_a_timer_with_its_own_fields(ctl: Ctl, threaded: Threaded, lines: Any) -> None:
    path = lines(
        {"payload": "é", "due": "2033-05-18T04:33:20+01:00", "key": "k", "headers": {"a": "b"}},
        "",
        {"payload_base64": "AP8=", "due_ms": 3 * 10**12},
        {"payload": "own id", "request_id": "mail-17", "delay": "1h"},
        {"payload": "default"},
    )
    code, out, err = ctl(
        "schedule", "orders", "--from", path, "--due-ms", f"{4 * 10**12}", "-o", "json"
    )
    assert (code, err) == (0, "")
    made = [json.loads(line) for line in out.splitlines()]
    assert [(one["line"], one["result"]) for one in made] == [
        (number, "SCHEDULED") for number in (1, 3, 4, 5)
    ]
    rows = {row.payload: row for row in threaded.cluster.rows}
    assert {row.due_ms for row in rows.values()} == {
        2 * 10**12,
        3 * 10**12,
        4 * 10**12,
        made[2]["due_ms"],
    }
    assert (rows["é".encode()].key, rows["é".encode()].headers) == (b"k", b"\1\0a\1\0b")
    assert b"\0\xff" in rows
    assert "mail-17" in threaded.cluster.named
    code, out, err = ctl("schedule", "orders", "--from", path)
    assert (code, out) == (5, "3 SCHEDULED, 1 REJECTED; 1 of them repeated\n")
    assert err == "timerctl: line 1: REJECTED: a pending timer has its key\n"


def test_ten_lines_whose_keys_are_taken_are_named_and_the_rest_counted(
    ctl: Ctl, threaded: Threaded, lines: Any
) -> None:
    path = lines(*({"payload": "p", "key": f"k{number}"} for number in range(1_200)))
    again = ("schedule", "orders", "--delay", "1h", "--from", path)
    assert ctl(*again)[:2] == (0, "1200 SCHEDULED\n")
    code, out, err = ctl(*again)
    assert (code, out) == (5, "1200 REJECTED\n")
    *named, rest = err.splitlines()
    assert [line.split(":")[1] for line in named] == [f" line {n}" for n in range(1, 11)]
    assert rest == "timerctl: 1190 more not scheduled; -o wide names each line"
    assert ctl(*again, "-o", "wide")[2].count("a pending timer has its key\n") == 1_200
    assert len(ctl(*again, "-o", "json")[1].splitlines()) == 1_200


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "must be JSON"),
        ('{"payload": "a", "payload": "b"}', "the name 'payload' is given twice"),
        ("[]", "[]: must be an object"),
        ({"payload": "p", "topic": "t"}, "unknown field 'topic'; known: payload"),
        ({}, "give one of payload and payload_base64"),
        ({"payload": "p", "payload_base64": "cA=="}, "give one of payload and payload_base64"),
        ({"payload": 1}, "payload = 1: must be a string"),
        ({"payload_base64": "c"}, "payload_base64: "),
        ({"payload": "p", "due_ms": 1, "delay": 1}, "give one of due_ms, delay"),
        ("true", "line 2: true: must be an object"),
        ({"payload": None, "key": True}, "key = true: must be a string"),
        ({"payload": "p", "due_ms": True}, "due_ms = true: must be a whole number"),
        ({"payload": "p", "due": True}, "due = true: must be a string"),
        ({"payload": "p", "delay": [None]}, "delay = [null]: must be a string or a number of"),
        ({"payload": "p", "priority": 99}, "line 2: priority = 99: must be 0 to 9"),
        ({"payload": "p", "due_ms": 1_900_000_000}, "line 2: due_ms = 1900000000: "),
        ({"payload": "p", "due": "2030-01-01"}, "due: '2030-01-01' needs a UTC offset"),
        ({"payload": "p", "delay": "soon"}, "'soon' is not a duration"),
        ({"payload": "p", "headers": {"a": 1}}, "must be an object of strings"),
        ({"payload": "p", "key": 1}, "key = 1: must be a string"),
        ('{"payload": "\\ud800"}', "payload = '\\ud800': must have a form in UTF-8"),
        ({"payload": "p", "delay": -5}, "delay: '-5' must not be negative"),
        ({"payload": "p", "delay": "999999999d"}, 'delay = "999999999d": must be 0 to'),
        ({"payload": "p", "request_id": ""}, "request_id = '': must have 1 to 64 bytes"),
        ({"payload": "p", "request_id": "i" * 65}, "must have 1 to 64 bytes"),
        ({"payload": "p", "request_id": "first"}, "request_id = 'first': line 1 has the same"),
        ({"payload": "p", "key": "é" * 513}, "key = 1026 bytes: must have at most 1024 bytes, the"),
        ({"payload": "p", "ordering_key": "k" * 1025}, "ordering_key = 1025 bytes: must have at"),
        ({"payload": "p", "headers": {"h": "v" * 32_764}}, "headers = 32769 bytes: must have at"),
        ({"payload": "p" * 4_194_305}, "payload = 4194305 bytes: must have at most 4194304 bytes"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_scheduled(
    ctl: Ctl, threaded: Threaded, lines: Any, line: Any, error: str
) -> None:
    first = {"payload": "p", "request_id": "first"}
    code, out, err = ctl("schedule", "orders", "--from", lines(first, line))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("timerctl: line 2: ")
    assert error in err
    assert threaded.cluster.requests == []


def test_a_file_is_checked_against_the_default_limits_and_standard_input_is_not(
    ctl: Ctl, threaded: Threaded, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LimitsConfig()
    assert cli_bulk.SIZES["payload"] == limits.payload_bytes_max
    assert cli_bulk.SIZES["key"] == cli_bulk.SIZES["ordering_key"] == limits.key_bytes_max
    assert cli_bulk.SIZES["headers"] == limits.headers_bytes_max
    line = {"payload": "p", "key": "k" * limits.key_bytes_max}
    assert ctl("schedule", "orders", "--from", lines(line))[0] == 0
    line["key"] += "k"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(line).encode())))
    assert ctl("schedule", "orders", "--from", "-")[0] == 2
    [columns] = threaded.cluster.requests[-1].timers  # the cluster has rejected it
    assert columns.key_sizes == [limits.key_bytes_max + 1]


def test_results_beside_the_line_that_the_cluster_rejects_are_printed_and_counted(
    ctl: Ctl, threaded: Threaded, lines: Any
) -> None:
    refused = wire_error(
        pb.REASON_INVALID_REQUEST, "payload = '1 bytes': too many", field="payload"
    )
    threaded.cluster.on_schedule = lambda request: refused if request.request_id == "b" else None
    named = [{"payload": "p", "request_id": name} for name in "abc"]
    path = lines({"payload": "p"}, *named[1:], {"payload": "p"}, named[0])
    code, out, err = ctl("schedule", "orders", "--from", path, "-o", "json")
    printed = [json.loads(line) for line in out.splitlines()]
    assert {1, 4} <= {one["line"] for one in printed} <= {1, 3, 4, 5}
    assert len(printed) == len(threaded.cluster.rows)
    assert (code, f'"done": {len(printed)}' in err) == (2, True)
    assert "line 2: payload = '1 bytes': too many" in err


def test_the_line_that_the_cluster_rejects_is_named(
    ctl: Ctl, threaded: Threaded, lines: Any
) -> None:
    refused = wire_error(pb.REASON_INVALID_REQUEST, "payload[1] = '11 bytes': must have at most 10")
    refused.field = "payload[1]"
    threaded.cluster.on_schedule = lambda _: refused
    path = lines({"payload": "p"}, {"payload": "p" * 11})
    code, _, err = ctl("schedule", "orders", "--from", path)
    assert code == 2
    assert "timerctl: line 2: payload = '11 bytes': must have at most 10\n" in err


def test_a_failed_command_continues_where_the_hint_says(
    ctl: Ctl, threaded: Threaded, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_bulk, "LINES_MAX", 2)
    path = lines(*({"payload": str(number)} for number in range(5)))
    requests = iter((None, wire_error(pb.REASON_QUOTA_REACHED, "enough")))
    threaded.cluster.on_schedule = lambda _: next(requests, None)
    code, _, err = ctl("schedule", "orders", "--from", path, "-o", "json", "--request-id", "id")
    error = json.loads(err)["error"]
    assert (code, error["done"], error["skip"], error["request_id"]) == (1, 2, 2, "id")
    requests = iter((None, wire_error(pb.REASON_QUOTA_REACHED, "enough")))
    code, _, err = ctl("schedule", "orders", "--from", path)
    assert code == 1
    hint = re.search(r"with (--skip 2 --request-id [0-9a-f]{16})\n", err)
    assert hint
    again = ("schedule", "orders", "--from", path, *hint[1].split())
    assert ctl(*again)[:2] == (0, "3 SCHEDULED\n")
    assert ctl(*again)[:2] == (0, "3 SCHEDULED; 3 of them repeated\n")
    payloads = sorted(row.payload for row in threaded.cluster.rows)
    assert payloads == [b"0", b"0", b"1", b"1", b"2", b"3", b"4"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_bulk.BulkSchedule, "_schedule_together", interrupted)
    code, _, err = ctl(*again, "-o", "json")
    assert (code, json.loads(err)["error"]["skip"]) == (130, 2)


def test_lines_wait_while_the_cluster_is_overloaded(
    ctl: Ctl, threaded: Threaded, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_bulk, "LINES_MAX", 2)
    path = lines({"payload": "a"}, {"payload": "b"}, {"payload": "c", "request_id": "own"})
    full = wire_error(pb.REASON_OVERLOADED, "the table of request ids", retry_after_ms=1_200)
    waits = [True]  # no repetition is on its way at a timeout of 2 s
    threaded.cluster.on_schedule = lambda _: full if waits and threaded.cluster.rows else None
    told = cli_bulk.BulkSchedule._progress

    def room(run: cli_bulk.BulkSchedule, *, is_last: bool = False) -> None:
        waits[:] = waits[is_last:]
        told(run, is_last=is_last)

    monkeypatch.setattr(cli_bulk.BulkSchedule, "_progress", room)
    code, out, err = ctl("schedule", "orders", "--from", path, "--timeout", "2s")
    assert (code, out) == (0, "3 SCHEDULED\n")
    assert err.count("timerctl: line 3 waits: not accepted within 2 s") == 1
    monkeypatch.setattr(cli_bulk, "WAIT_S", -1.0)
    waits.append(True)
    code, _, err = ctl("schedule", "orders", "--from", path, "--timeout", "2s")
    assert (code, "--skip 0 --request-id" in err) == (1, True)


def test_standard_input_and_wrong_combinations(
    ctl: Ctl, threaded: Threaded, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"{")))
    code, _, err = ctl("schedule", "orders", "--from", "-")
    assert (code, err.startswith("timerctl: line 1: must be JSON")) == (2, True), "nothing to go on"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"payload": "a"}\n{')))
    code, _, err = ctl("schedule", "orders", "--from", "-")
    assert (code, "line 2: must be JSON" in err) == (2, True)
    monkeypatch.setattr("sys.stdin", None)
    path = lines({"payload": "p"})
    for wrong, error in (
        (("--from", "-"), "standard input is closed"),
        (("-",), "standard input is closed"),
        (("p", "--from", path), "takes no PAYLOAD"),
        (("--from", path, "--key", "k"), "takes no PAYLOAD"),
        (("--from", "absent"), "--from = 'absent': No such file"),
        (("--from", path, "--skip", "-1"), "--skip = -1: must not be negative"),
        (("--from", path, "--request-id", "i" * 41), "at most 40 bytes"),
        (("p", "--skip", "1"), "--skip = 1: needs --from"),
        ((), "required: PAYLOAD, or --from FILE"),
    ):
        code, _, err = ctl("schedule", "orders", *wrong)
        assert (code, error in err) == (2, True), err
    assert ctl("schedule", "orders", "--from", lines())[:2] == (0, "no lines\n")


def test_timers_are_listed_as_lines_that_schedule_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = [
        {"payload": "a", "due_ms": 9_000_000_000_000, "key": "k", "priority": 7},
        {"payload_base64": "AP8=", "due_ms": 9_000_000_000_001, "priority": 4},
    ]
    wanted[0] |= {"headers": {"h": "1"}, "ordering_key": "o"}
    file = tmp_path / "lines"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in wanted))
    with FakeCluster() as fake:
        monkeypatch.setattr(timerctl, "_client", lambda _: fake.client())

        def run(*argv: str) -> tuple[int, str]:
            return timerctl.main([*argv]), capsys.readouterr().out

        for topic in ("orders", "copies"):
            assert run("schedule", topic, "--from", str(file)) == (0, "2 SCHEDULED\n")
            code, out = run("timers", "list", topic, "--lines")
            assert (code, [json.loads(line) for line in out.splitlines()]) == (0, wanted)
            file.write_text(out)
        assert run("timers", "list", "orders", "--lines", "--limit", "1")[1].count("\n") == 1
        assert run("timers", "list", "orders", "--lines", "--limit", "0")[0] == 2


def test_requests_have_as_many_headers_as_the_cluster_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lines: Any
) -> None:
    line = {"payload": "", "headers": {str(number): "" for number in range(40)}, "delay": 60}
    with FakeCluster() as fake:
        monkeypatch.setattr(timerctl, "_client", lambda _: fake.client())
        code = timerctl.main(["schedule", "orders", "--from", lines(*[line] * 500)])
        assert (code, capsys.readouterr()) == (0, ("500 SCHEDULED\n", ""))
