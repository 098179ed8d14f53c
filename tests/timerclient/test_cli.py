"""timerctl: what it prints, and how it exits."""

import argparse
import importlib.metadata
import io
import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from cluster.api import timer_changes
from tests.timerclient.conftest import Answering, Ctl, Threaded, once
from tests.timerclient.fake_cluster import NOW_MS, wire_error
from timerclient.cli import cli_args, cli_errors, output, timerctl
from timerclient.cli.missing_modules import DISTRIBUTION
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.message_json import as_dict
from timerclient.values import errors


def test_status_as_table_and_json(ctl: Ctl) -> None:
    code, out, err = ctl("status")
    assert (code, err) == (0, "")
    assert "leader n1" in out
    assert [line.split()[3] for line in out.splitlines()[3:]] == ["yes", "-", "-"]
    document = json.loads(ctl("status", "-o", "json")[1])
    assert document["leader"] == "n1"
    assert [node["role"] for node in document["nodes"]] == ["leader", "follower", "follower"]


def test_status_of_a_cluster_without_a_leader_exits_3(ctl: Ctl, threaded: Threaded) -> None:
    threaded.cluster.leader = None
    code, out, _ = ctl("status")
    assert code == 3
    assert "leader none" in out


def test_status_names_the_state_of_a_node_that_takes_no_part(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    leads = pb.NodeStatus(name="n1", reachable=True, role="leader", serving=True, epoch=1)
    waits = pb.NodeStatus(name="n2", role="waiting to be replaced", error="its promise")
    gone = pb.NodeStatus(name="n3", role="unreachable", error="refused")
    nodes = [leads, waits, gone]
    answer = pb.GetStatusResponse(cluster_id="c", epoch=1, leader="n1", nodes=nodes)
    monkeypatch.setattr(timerctl, "_client", lambda _: Answering(status=answer))
    lines = ctl("status")[1].splitlines()[-2:]
    notes = [line.rpartition("-  ")[2] for line in lines]
    assert notes == ["waiting to be replaced: its promise", "refused"]


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"reachable": False, "role": "", "epoch": 0}, "n1 is appointed and does not answer"),
        ({"role": "candidate"}, "n1 is appointed for epoch 1 and does not lead"),
        ({"serving": False}, "n1 leads and does not serve yet"),
    ],
)
def test_status_names_no_leader_that_does_not_serve(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], trouble: str
) -> None:
    node: dict[str, Any] = {"name": "n1", "reachable": True, "role": "leader"}
    node |= {"serving": True, "epoch": 1, "withholds_votes": True, "warnings": ["not ready: x"]}
    named = pb.NodeStatus(**(node | change))
    learner = pb.NodeStatus(name="n2", reachable=True, role="learner")
    answer = pb.GetStatusResponse(cluster_id="c", epoch=1, leader="n1", nodes=[named, learner])
    monkeypatch.setattr(timerctl, "_client", lambda _: Answering(status=answer))
    code, out, _ = ctl("status")
    assert code == 3
    assert "leader none" in out
    trouble += f"; {int(named.reachable)} of 2 nodes answer and vote"
    assert f"the cluster does not serve: {trouble}" in out
    assert ("withholds Raft votes" in out) == ("reachable" not in change)
    assert ("not ready: x" in out) == ("reachable" not in change)
    document = json.loads(ctl("status", "-o", "json")[1])
    assert (document["serves"], document["trouble"]) == (False, trouble)
    if "reachable" in change:  # its figures are unknown, and not 0
        assert {*out.splitlines()[-2].split()[1:8]} == {"-"}
        assert document["nodes"][0]["pending"] is None


def test_topics_list_each_group_and_topics_without(ctl: Ctl, threaded: Threaded) -> None:
    threaded.seed("orders", [b""] * 3)
    ctl("topics", "create", "quiet")
    ctl("groups", "create", "orders", "billing")
    ctl("policies", "set", "--namespace", "default", "pending_max=9")
    ctl("schedule", "orders", "x", "--delay", "1h")
    code, out, _ = ctl("topics")
    assert code == 0
    topics, quotas = out.split("\n\n")
    assert [line.split()[0] for line in topics.splitlines()] == ["TOPIC", "orders", "quiet"]
    assert [line.split() for line in quotas.splitlines()] == [
        ["TOPIC", "QUOTA", "USED", "LIMIT", "FROM"],
        ["orders", "pending_max", "1", "9", "namespace"],
        ["quiet", "pending_max", "0", "9", "namespace"],
    ]
    document = json.loads(ctl("topics", "-o", "json")[1])
    assert document["topics"][0]["groups"][0]["unacked"] == 3


def test_schedule_prints_the_id_that_cancel_takes(ctl: Ctl, threaded: Threaded) -> None:
    args = ("schedule", "orders", "hello", "--delay", "30s", "--key", "k", "--header", "a=b=c")
    code, out, _ = ctl(*args, "-o", "json")
    assert code == 0
    timer = json.loads(out)
    [row] = threaded.cluster.rows
    assert (row.payload, row.key, row.headers) == (b"hello", b"k", b"\1\0a\3\0b=c")
    assert row.due_ms == timer["due_ms"]
    code, out, _ = ctl("cancel", timer["id"])
    assert (code, "CANCELLED" in out) == (0, True)
    code, out, _ = ctl("cancel", timer["id"], "0" * 24, "-o", "json")
    assert code == 5
    results = [result["result"] for result in json.loads(out)["results"]]
    assert results == ["ALREADY_CANCELLED", "NOT_FOUND"]


def test_schedule_takes_instants_and_standard_input(
    ctl: Ctl, threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ctl("schedule", "orders", "a", "--due", "2001-09-09T02:46:40+01:00")[0] == 0
    assert ctl("schedule", "orders", "b", "--due-ms", "2000000000000")[0] == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\0raw")))
    assert ctl("schedule", "orders", "-")[0] == 0
    rows = threaded.cluster.rows
    assert [row.due_ms for row in rows[:2]] == [10**12, 2 * 10**12]
    assert rows[2].payload == b"\0raw"


def test_consume_prints_a_line_per_message_and_acks(ctl: Ctl, threaded: Threaded) -> None:
    threaded.seed("orders", [b"text", b"\xff", b"third"])
    look = ("consume", "orders", "--group", "g", "--count", "2", "--no-ack")
    assert ctl(*look)[0] == 0
    assert threaded.cluster.acked == set()
    code, out, _ = ctl("consume", "orders", "--group", "g", "--count", "3", "-o", "json")
    assert code == 0
    messages = [json.loads(line) for line in out.splitlines()]
    assert sorted(m.get("payload") or m["payload_base64"] for m in messages) == [
        *("/w==", "text", "third"),
    ]
    assert {m["queue_offset"]: m["attempt"] for m in messages} == {0: 2, 1: 2, 2: 1}
    assert threaded.cluster.acked == {0, 1, 2}
    code, out, _ = ctl("consume", "orders", "--group", "g", "--idle", "100ms", "-o", "json")
    assert (code, out) == (0, "")


def test_half_a_command_is_no_topic_and_a_header_is_given_once(ctl: Ctl) -> None:
    for word in ("describe", "create", "pause", "resume", "delete"):
        code, _, err = ctl("topics", word)
        assert (code, "required: TOPIC" in err) == (2, True)
    code, _, err = ctl("schedule", "orders", "p", "--header", "a=1", "--header", "a=2")
    assert (code, err) == (2, "timerctl: --header = 'a=2': each name once\n")


def test_consume_with_a_count_ends_when_fewer_messages_come(ctl: Ctl, threaded: Threaded) -> None:
    threaded.seed("orders", [b"1"])
    code, out, err = ctl(*("consume", "orders", "--group", "g", "--count", "2", "--timeout", "3s"))
    assert (code, out.count("\n")) == (6, 1)
    assert err == "timerctl: 1 of 2 messages arrived; no further one within 3s (--idle)\n"
    assert threaded.cluster.acked == {0}


def test_what_cannot_be_printed_is_not_acked(
    ctl: Ctl, threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

        def fileno(self) -> int:
            raise OSError

    threaded.seed("orders", [b"1", b"2"])
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", Gone())
        assert timerctl.main(["consume", "orders", "--group", "g", "--count", "2"]) == 0
    assert threaded.cluster.acked == set()


def test_output_on_a_full_disk_leaves_the_outcome_unknown(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        assert timerctl.main(["schedule", "orders", "p", "--key", "k", "--delay", "1h"]) == 4
    why = "can't write the output: No space left on device"
    assert capsys.readouterr().err == f"timerctl: {why}; the outcome is unknown\n"
    assert ctl("timers", "get", "--topic", "orders", "--key", "k")[0] == 0


def test_what_messages_hold_neither_breaks_lines_nor_reaches_the_terminal(ctl: Ctl) -> None:
    named = ("--key", "k\n\u202e", "--header", "h=\r")
    ctl("schedule", "orders", "a\nb\x1b[2J", "--delay", "1h", *named)
    for look in (("list", "orders"), ("get", "--topic", "orders", "--key", "k\n\u202e")):
        code, out, _ = ctl("timers", *look)
        assert code == 0
        assert not {"\x1b", "\u202e", "\r"} & {*out}
        assert (r"a\nb\x1b[2J" in out, r"k\n\u202e" in out) == (True, True)
    [timer] = json.loads(ctl("timers", "list", "orders", "-o", "json")[1])["timers"]
    assert timer["payload"] == "a\nb\x1b[2J"  # programs get it as it is


def test_unknown_outcome_exits_4(ctl: Ctl, threaded: Threaded) -> None:
    threaded.cluster.on_schedule = lambda _: wire_error(pb.REASON_COMMIT_TIMEOUT)
    code, _, err = ctl("schedule", "orders", "x", "--timeout", "4s")
    assert code == 4
    assert err.startswith("timerctl: no answer within 4 s")
    assert err.endswith("; the outcome is unknown\n")
    assert err.count("\n") == 1


def test_unreachable_cluster_exits_3(ctl: Ctl) -> None:
    for command in (("status",), ("topics",), ("consume", "orders", "--group", "g")):
        code, out, err = ctl(*command, "--endpoints", "127.0.0.1:1", "--timeout", "100ms")
        assert (code, out) == (3, "")
        assert err.startswith("timerctl: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("nonsense",),
        ("schedule", "orders", "x", "--due", "2030-01-01T00:00:00"),
        ("schedule", "orders", "x", "--delay", "soon"),
        ("schedule", "orders", "x", "--delay", "٩s"),
        ("schedule", "orders", "x", "--delay", "1s", "--due-ms", "1"),
        ("schedule", "orders", "x", "--header", "novalue"),
        ("schedule", "orders", "x", "--on-conflict", "replace"),
        ("consume", "orders"),
        ("status", "-o", "xml"),
        ("status", "--token", "secret"),  # not an abbreviation of --token-file
    ],
)
def test_wrong_command_line_exits_2(ctl: Ctl, argv: tuple[str, ...]) -> None:
    assert ctl(*argv)[0] == 2


def test_wrong_values_exit_2(ctl: Ctl) -> None:
    assert ctl("status", "--endpoints", "nowhere")[0] == 2
    assert ctl("cancel", "tooshort")[0] == 2
    assert ctl("consume", "orders", "--group", "g", "--count", "0")[0] == 2


def test_errors_are_documents_where_json_is_asked_for(ctl: Ctl) -> None:
    code, out, err = ctl("-o", "json", "transfer", "nobody")
    assert (code, out) == (1, "")
    error = json.loads(err)["error"]
    assert (error["reason"], error["exit_code"]) == ("NOT_FOUND", 1)
    assert error["message"] == "no such node: 'nobody'"
    code, _, err = ctl("consume", "orders", "--group", "g", "--count", "0", "-ojson")
    error = json.loads(err)["error"]
    assert (code, error["field"], error["limit"]) == (2, "--count", "must be positive")
    code, _, err = ctl("members", "nonsense", "--output=json")
    assert (code, json.loads(err)["error"]["reason"]) == (2, "USAGE")


def test_version_is_the_distributions(ctl: Ctl) -> None:
    assert ctl("--version")[:2] == (
        0,
        f"timerctl {importlib.metadata.version(DISTRIBUTION)}\n",
    )


HEAVY = ("aiohttp", "asyncio", "google.protobuf", "grpc", "numpy", "pyarrow", "pyspark")
ONE_OF_MANY = ("importlib.metadata", "timerclient.cli.cli_check", "timerclient.cli.cli_policies")


def loaded_by(*lines: str) -> str:
    """Return the modules of HEAVY and ONE_OF_MANY that command lines load, in one process."""
    code = (
        "import contextlib, sys; from timerclient.cli.timerctl import main\n"
        f"for line in {lines!r}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):\n"
        "        main(line.split())\n"
        f"print(*(m for m in {(*HEAVY, *ONE_OF_MANY)!r} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    return done.stdout.strip()


def test_help_and_usage_errors_load_no_client_and_no_other_command() -> None:
    assert loaded_by("--version", "schedule --help", "schedule", "context nonsense") == ""


def test_no_parser_of_a_command_loads_a_heavy_package() -> None:
    found = loaded_by("--help", "shedule", "policies set --cluster ttl_ms=1x", "completion bash")
    assert {*found.split()} == {*ONE_OF_MANY}


def test_tables_are_cut_to_the_terminal_and_ids_are_not() -> None:
    rows = [("0" * 24, "p" * 60, "x" * 60), ("1" * 24, "q", "y")]
    lines = output.table(("ID", "PAYLOAD", "KEY"), rows, 80).splitlines()
    assert max(map(len, lines)) == 80
    assert lines[1].startswith("0" * 24)
    assert lines[1].count("…") == 2
    assert output.table(("ID", "PAYLOAD", "KEY"), rows, 10).splitlines()[2].startswith("1" * 24)


def test_ids_of_64_bits_are_text_in_json() -> None:
    group = as_dict(pb.GroupStatus(group_id=1 << 62, cursor=1 << 60))
    assert (group["group_id"], group["cursor"]) == (str(1 << 62), 1 << 60)
    assert as_dict(pb.ProducerStatus(producer=255))["producer"] == "00000000000000ff"
    assert as_dict(pb.TopicStatus())["topic_id"] is None


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("schedule", "TOPIC created if it does not exist"),
        ("schedule", "Without a due time the timer fires at once."),
        ("schedule", "a bare number is in seconds"),
        ("consume", "TOPIC created if it does not exist"),
        ("consume", "time of one request"),
        ("policies set", "created if it does not exist"),
        ("policies set", "A bare number of a duration is in milliseconds"),
    ],
)
def test_help_states_defaults_units_and_side_effects(ctl: Ctl, command: str, text: str) -> None:
    code, out, _ = ctl(*command.split(), "--help")
    assert (code, text in " ".join(out.split())) == (0, True)


def test_help_of_every_command_states_its_effect() -> None:
    parsers: list[argparse.ArgumentParser] = [timerctl.make_parser()]
    while parsers:
        parser = parsers.pop()
        assert parser.description, parser.prog
        for action in parser._actions:
            if isinstance(action.choices, dict):
                parsers += action.choices.values()


def test_help_documents_the_exit_codes(ctl: Ctl) -> None:
    for argv in (("--help",), ("schedule", "--help")):
        code, out, _ = ctl(*argv)
        assert code == 0
        assert "3    the cluster can't be reached" in out


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1h30m", 5400), ("250ms", 0.25), ("2d", 172_800), ("1.5", 1.5), ("7", 7)],
)
def test_durations(text: str, seconds: float) -> None:
    assert cli_args.duration(text) == timedelta(seconds=seconds)


def test_error_decides_the_exit_code() -> None:
    assert cli_errors.exit_code(errors.Unreachable("x")) == 3
    assert cli_errors.exit_code(errors.CommitTimeout("x")) == 4
    assert cli_errors.exit_code(errors.OutcomeForgotten("x")) == 4
    assert cli_errors.exit_code(errors.InvalidRequest("x")) == 2


class Entry:
    """An entry point that gives or raises what it is told."""

    def __init__(self, name: str, gives: Any) -> None:
        self.name = name
        self.gives = gives

    def __lt__(self, other: "Entry") -> bool:
        return self.name < other.name

    def load(self) -> Any:
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives


def test_commands_of_other_packages_are_added_and_broken_ones_say_why(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def good(commands: Any) -> None:
        commands.add_parser("good").set_defaults(run=lambda _: 7)

    def halfway(commands: Any) -> None:
        commands.add_parser("halfway").set_defaults(run=lambda _: 8)
        raise AttributeError

    entries = [
        Entry("good", good),
        Entry("halfway", halfway),
        Entry("audit", ModuleNotFoundError("No module named 'pyspark'", name="pyspark")),
        Entry("lost", ModuleNotFoundError("No module named 'nowhere.x'", name="nowhere.x")),
        Entry("odd", AttributeError("100% wrong")),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    assert ctl("good")[0] == 7
    assert ctl("halfway")[0] == 8
    code, _, err = ctl("audit", "--any", "thing")
    assert code == 1
    assert "needs pyspark: pip install '.[audit]' in a clone" in err
    assert "nowhere.x, which is not installed" in ctl("lost")[2]
    assert "100% wrong" in ctl("odd")[2]
    code, out, _ = ctl("--help")
    assert code == 0
    assert "100% wrong" in out
    assert ctl("status")[0] == 0


def test_groups_are_made_altered_and_listed(ctl: Ctl, threaded: Threaded) -> None:
    threaded.seed("orders", [b""] * 3)
    ctl("topics", "create", "quiet")
    settings = ("--max-attempts", "5", "--backoff-min", "250ms", "--backoff-max", "1m")
    code, out, err = ctl("-o", "wide", "groups", "create", "orders", "billing", *settings)
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split() == [
        *("orders", "billing", "shared", "0", "3", "0", "0", "30000", "5", "250..60000"),
        "orders.billing.dead",
    ]
    [request] = threaded.cluster.called(pb.CreateGroupRequest)
    assert request.settings.HasField("lease_ms") is False
    assert "LEASE MS" in ctl("groups", "describe", "orders", "billing")[1]
    _, out, _ = ctl("groups", "alter", "orders", "billing", "--max-attempts", "0", "-o", "json")
    assert json.loads(out)["groups"][0]["settings"]["max_attempts"] == 0
    assert ctl("groups", "alter", "orders", "nobody", "--lease", "5s")[0] != 0
    assert ctl("groups", "list")[0] == 0
    [group] = json.loads(ctl("groups", "list", "orders", "-o", "json")[1])["groups"]
    assert group["unacked"] == 3
    assert ctl("groups", "describe", "orders", "nobody")[0] != 0
    assert ctl("groups", "describe", "default/orders", "billing")[0] == 0
    assert ctl("groups", "list", "quiet")[1].strip() == "no groups"
    assert ctl("groups", "list", "nothing")[0] != 0


def test_groups_are_sought_reset_and_deleted(ctl: Ctl, threaded: Threaded) -> None:
    seek, cluster = ("groups", "seek", "orders", "billing", "--yes"), threaded.cluster
    threaded.seed("orders", [b""] * 9)
    ctl("groups", "create", "orders", "billing")
    code, out, err = ctl(*seek, "--offset", "7", "-o", "wide")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[3] == "7"
    assert ctl(*seek, "--time", "1970-01-01T00:00:02Z")[0] == 0
    assert ctl(*seek, "--latest")[0] == 0
    assert ctl("groups", "reset", "orders", "billing", "--yes")[0] == 0
    for unsure in (("seek", "orders", "billing", "--latest"), ("reset", "orders", "billing")):
        code, _, err = ctl("groups", *unsure)
        assert (code, f" {unsure[0]} group billing of orders needs --yes" in err) == (2, True)
    seeks = cluster.called(pb.SeekGroupRequest)
    places = [(each.WhichOneof("to"), each.time_ms, each.start) for each in seeks]
    assert places[1:] == [
        ("time_ms", 2_000, pb.GROUP_START_UNSPECIFIED),
        ("start", 0, pb.GROUP_START_LATEST),
        ("start", 0, pb.GROUP_START_UNSPECIFIED),
    ]
    for wrong in ((), ("--offset", "7", "--latest"), ("--time", "2030-01-01")):
        assert ctl(*seek, *wrong)[0] == 2
    assert ctl(*seek, "--offset", "-1")[0] == 2
    code, _, err = ctl("groups", "delete", "orders", "billing")
    assert (code, cluster.called(pb.DeleteGroupRequest)) == (2, [])
    assert "needs --yes" in err
    assert ctl("groups", "delete", "orders", "billing", "--yes")[0] == 0
    assert ctl("groups", "delete", "orders", "nobody", "--yes")[0] == 1
    ctl("groups", "create", "orders", "g", "--type", "exclusive", "--max-in-flight", "9")
    settings = cluster.called(pb.CreateGroupRequest)[-1].settings
    assert (settings.type, settings.max_in_flight) == ("exclusive", 9)
    assert ctl("groups", "create", "orders", "g", "--type", "other")[0] == 2


def test_own_parser_has_no_command_without_a_run() -> None:
    parser = timerctl.make_parser()
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for name in ("status", "checkpoint", "topics", "schedule", "cancel", "consume", "transfer"):
        assert commands.choices[name].get_default("run") is not None


def test_tables_align_and_numbers_stay_numbers() -> None:
    text = output.table(("A", "LONG"), [("x", 1), ("yy", 200)])
    assert text.splitlines() == ["A   LONG", "x      1", "yy   200"]
    document = as_dict(pb.GetCheckpointResponse(nodes=[pb.NodeCheckpoint(log_end=1 << 60)]))
    assert document["nodes"][0]["log_end"] == 1 << 60
    assert document["shared"] is None
    assert output.instant(0) == "-"
    assert output.instant(1_000) == "1970-01-01T00:00:01.000Z"
    assert output.instant(1 << 62) == str(1 << 62)


# ---- timers …


def test_timers_are_listed_counted_and_shown(ctl: Ctl) -> None:
    for at in range(5):
        assert (
            ctl("schedule", "orders", f"p{at}", "--delay", f"{at + 1}h", "--key", f"k{at}")[0] == 0
        )
    code, out, _ = ctl("timers", "list", "orders", "--limit", "4")
    assert (code, out.count("  p"), "and more" in out) == (0, 4, True)
    listed = json.loads(ctl("-o", "json", "timers", "list", "orders", "--key-prefix", "k3")[1])
    [timer] = listed["timers"]
    assert (timer["key"], timer["payload"], timer["state"], listed["more"]) == (
        *("k3", "p3", "PENDING"),
        False,
    )
    assert json.loads(ctl("-o", "json", "timers", "get", timer["id"])[1]) == timer
    shown = dict(
        line.split(maxsplit=1) for line in ctl("timers", "get", timer["id"])[1].splitlines()
    )
    assert (shown["due"], shown["requested"]) == (output.instant(timer["due_ms"]),) * 2
    assert shown["held"] == "no"
    by_key = ctl("-o", "json", "timers", "get", "--topic", "orders", "--key", "k3")[1]
    assert json.loads(by_key) == timer
    counts = json.loads(ctl("-o", "json", "timers", "count", "orders")[1])
    assert (counts["pending"], counts["within"]["10m"], counts["within"]["1h"]) == (5, 0, 1)
    assert ctl("timers", "count", "orders", "--key-prefix", "k3")[1] == "1 pending\n"
    assert ctl("timers", "get", "--topic", "orders", "--key", "none")[0] == 1


def test_timers_are_cancelled_and_rescheduled_by_id_key_and_filter(ctl: Ctl) -> None:
    for at in range(9):
        ctl("schedule", "orders", f"p{at}", "--delay", f"{at + 1}h", "--key", f"k{at}")
    assert ctl("timers", "cancel", "--topic", "orders", "--key", "k0", "--key", "k1")[0] == 0
    assert ctl("timers", "cancel", "--topic", "orders", "--key", "k0")[0] == 5
    moved = ctl(
        "-o", "json", "timers", "reschedule", "--topic", "orders", "--key", "k2", "--delay", "9h"
    )
    [result] = json.loads(moved[1])["results"]
    assert result["result"] == "RESCHEDULED"
    again = ctl("timers", "reschedule", result["new_id"], "--due", "2030-01-01T00:00:00Z")
    assert (again[0], "2030-01-01" in again[1]) == (0, True)
    assert ctl("timers", "reschedule", result["new_id"], "--delay", "1s")[0] == 5
    assert (
        "4 rescheduled"
        in ctl(
            *("timers", "reschedule", "--topic", "orders", "--to", str(NOW_MS + 8 * 3_600_000)),
            *("--delay", "30d", "--yes"),
        )[1]
    )
    those = ("timers", "cancel", "--topic", "orders", "--key-prefix", "k")
    code, _, err = ctl(*those)
    assert (code, "needs --yes" in err) == (2, True)
    assert "7 cancelled" in ctl(*those, "--yes")[1]
    for argv in (["cancel"], ["cancel", "x", "--topic", "t"], ["reschedule", "--delay", "1s"]):
        code, _, err = ctl("timers", *argv)
        assert (code, "give ids; or" in err) == (2, True)
    assert ctl("timers", "reschedule", "x")[0] == 2


@pytest.mark.parametrize(
    ("action", "done"),
    [(["cancel"], "cancelled"), (["reschedule", "--delay", "1d"], "rescheduled")],
)
def test_whole_topic_is_changed_only_when_that_is_said(
    ctl: Ctl, threaded: Threaded, monkeypatch: pytest.MonkeyPatch, action: list[str], done: str
) -> None:
    for at in range(5):
        ctl("schedule", "orders", f"p{at}", "--delay", "1h")
    code, _, err = ctl("timers", *action, "--topic", "orders", "--all")
    assert (code, "needs --yes" in err) == (2, True)
    change = ("timers", *action, "--yes", "--topic", "orders")
    for more in ([], ["--all", "--key-prefix", "k"], ["--all", "--key", "k"]):
        code, _, err = ctl(*change, *more)
        assert (code, "--all" in err) == (2, True)
    assert ctl("timers", *action, "--all")[0] == 2  # of which topic?
    count = ("-o", "json", "timers", "count", "orders")
    assert json.loads(ctl(*count)[1])["within"]["1h"] == 5
    monkeypatch.setattr(timer_changes, "FILTER_PAGE", 3)
    threaded.cluster.on_call = once(None, "lose")
    assert ctl(*change, "--all")[:2] == (0, f"at least 2 {done}\n")
    assert json.loads(ctl(*count)[1])["within"]["1h"] == 0
    assert json.loads(ctl("-o", "json", *change, "--key-prefix", "k")[1]) == {
        done: 0,
        "exact": True,
    }


def test_schedule_says_what_became_of_a_taken_key(ctl: Ctl) -> None:
    ctl("schedule", "orders", "p", "--key", "k", "--delay", "1h")
    code, _, err = ctl("schedule", "orders", "q", "--key", "k", "--delay", "1h")
    assert (code, "has the key" in err) == (1, True)
    kept = ctl("schedule", "orders", "q", "--key", "k", "--on-conflict", "keep")
    assert (kept[0], kept[1].rstrip().endswith("KEPT")) == (0, True)


def test_timerctl_deletes_a_topic_when_it_is_told_yes(ctl: Ctl, threaded: Threaded) -> None:
    for topic in ("orders", "quiet"):
        threaded.seed(topic, [b""] * 3)
        ctl("schedule", topic, "x", "--delay", "1h")
        ctl("groups", "create", topic, "billing")
    code, _, err = ctl("topics", "delete", "orders")
    assert (code, threaded.cluster.called(pb.DeleteTopicRequest)) == (2, [])
    assert "delete topic orders needs --yes without a terminal" in err
    code, out, _ = ctl("topics", "delete", "orders", "--yes", "-o", "json")
    assert code == 0
    told = json.loads(out)
    assert (told["deleted"], told["pending"], told["groups"][0]["unacked"]) == ("orders", 1, 3)
    code, out, _ = ctl("topics", "delete", "quiet", "--yes")
    assert "topic quiet is deleted, with 1 pending timer and 3 messages" in out
    assert "group billing: 3 unacked" in out
    assert ctl("topics", "delete", "nothing", "--yes")[0] == 1
    code, _, err = ctl("topics", "remove", "orders")
    assert (code, "invalid choice: 'remove'" in err) == (2, True)


def process(threaded: Threaded, *argv: str, stdout: int) -> "subprocess.Popen[bytes]":
    run = "import sys; from timerclient.cli.timerctl import main; sys.exit(main())"
    set_here = {"TIMERCTL_ENDPOINTS": threaded.cluster.address, "PYTHONIOENCODING": "ascii"}
    env = {**os.environ, **set_here}
    env.pop("PYTHONUNBUFFERED", None)
    return subprocess.Popen(
        [sys.executable, "-c", run, *argv], stdout=stdout, stderr=subprocess.PIPE, env=env
    )


def test_reader_that_has_gone_is_no_error(threaded: Threaded) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    ctl = process(threaded, "status", stdout=writes)
    os.close(writes)
    _, err = ctl.communicate(timeout=120)
    assert (ctl.returncode, err) == (0, b"")


def test_letters_that_the_terminal_lacks_are_told_by_their_numbers(threaded: Threaded) -> None:
    name = "auftr\N{LATIN SMALL LETTER A WITH DIAERESIS}ge"
    ctl = process(threaded, "topics", "delete", name, "--yes", stdout=subprocess.PIPE)
    out, err = ctl.communicate(timeout=120)
    assert b"auftr\\xe4ge" in out + err, (out, err)
    assert b"Traceback" not in err


def test_json_is_json_whatever_the_terminal_has(threaded: Threaded) -> None:
    text = "auftr\N{LATIN SMALL LETTER A WITH DIAERESIS}ge"
    threaded.seed("orders", [text.encode()])
    ctl = process(
        threaded, "-o", "json", "consume", "orders", "--group", "g", "--count", "1",
        stdout=subprocess.PIPE,
    )  # fmt: skip
    out, err = ctl.communicate(timeout=120)
    assert (ctl.returncode, err) == (0, b"")
    assert json.loads(out)["payload"] == text


def test_command_without_an_output_does_nothing(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert timerctl.main(["schedule", "orders", "p"]) == 2
    assert threaded.cluster.requests == []
