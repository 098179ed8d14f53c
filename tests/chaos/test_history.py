"""The histories: every line whole and on disk at once, and what is made of a run's folder."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chaos.history.history import (
    CLOCK_ERROR,
    MARK_NONE,
    MS_MAX,
    FaultTimeline,
    OpOutcome,
    RunFolder,
    leader_kills,
    mark_of,
    payload_of,
    read,
    read_faults,
)
from tests.chaos.told_history import ToldHistory


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.mark.parametrize("mark", [0, 1, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("size", [8, 9, 100])
def test_mark_comes_back_from_the_payload(mark: int, size: int) -> None:
    payload = payload_of(mark, size)
    assert len(payload) == size
    assert mark_of(payload) == mark


def test_short_payload_has_no_mark() -> None:
    assert mark_of(b"1234567") == MARK_NONE


def test_requests_and_answers_are_numbered_in_their_order(run: RunFolder) -> None:
    ids = ["0" * 24]
    with ToldHistory(run, "c1") as history:
        first, second = (history.asks("cancel", start_ms=1, ids=ids) for _ in range(2))
        history.change(
            "cancel",
            ids=ids,
            results=["ALREADY_FIRED"],
            span_ms=(1, 2),
            outcome=OpOutcome.OK,
            request=first,
        )
        third = history.asks("cancel", start_ms=1, ids=ids)
    *_, answer, _ = read(run.histories / "c1.jsonl")
    assert first < second < answer["answered"] < third


def test_line_is_on_disk_when_the_call_returns(run: RunFolder) -> None:
    with ToldHistory(run, "c1") as history:
        history.schedule(
            [7, 8], ids=["a", "b"], due_ms=None, topic="t", span_ms=(1, 2), outcome=OpOutcome.OK
        )
        (line,) = read(run.histories / "c1.jsonl")
    assert line == {
        "op": "schedule",
        "client": "c1",
        "start_ms": 1,
        "end_ms": 2,
        "outcome": "ok",
        "topic": "t",
        "marks": [7, 8],
        "ids": ["a", "b"],
        "due_ms": None,
    }


def test_ok_without_ids_is_refused(run: RunFolder) -> None:
    with ToldHistory(run, "c1") as history, pytest.raises(AssertionError):
        history.schedule([7], ids=None, due_ms=[1], topic="t", span_ms=(1, 2), outcome=OpOutcome.OK)


def test_torn_last_line_is_left_out(run: RunFolder) -> None:
    with ToldHistory(run, "c1") as history:
        history.open("t", "g", start_ms=1)
        history.deliver("t", "g", received_ms=2, offsets=[0])
    path = run.histories / "c1.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    assert [line["op"] for line in read(path)] == ["open"]


def test_longest_time_without_a_kill_of_the_leader_is_between_strikes() -> None:
    def line(event: str, at_ms: int, role: str | None = None) -> dict[str, Any]:
        return {"event": event, "at_ms": at_ms} | ({"role": role} if role else {})

    assert leader_kills([line("kill", 5, "leader")]) == {}
    strikes = [line("strike", at_ms) for at_ms in (100, 120, 400, 1000)]
    assert leader_kills(strikes) == {
        "kills": 0, "longest_without_ms": 900, "long_gaps": 0, "strikes_apart": 4
    }  # fmt: skip
    kills = [
        line("kill", 130, "leader"),
        line("kill", 500, "leader"),
        line("kill", 600, "follower"),
    ]
    told = {"longest_without_ms": 500, "long_gaps": 0, "strikes_apart": 2}
    assert leader_kills([*strikes, *kills]) == {"kills": 2} | told
    late = [line("kill", 200), line("kill", 1100, "leader"), line("kill", 300, "leader")]
    assert leader_kills([*strikes, *kills, *late]) == {"kills": 4} | told
    one = {"kills": 0, "longest_without_ms": 0, "long_gaps": 0, "strikes_apart": 1}
    assert leader_kills([line("strike", 7)]) == one
    long = [line("strike", 0), line("kill", 15_000, "leader"), line("strike", 30_001)]
    told = {"longest_without_ms": 15_001, "long_gaps": 1, "strikes_apart": 1}
    assert leader_kills(long) == {"kills": 1} | told


def test_two_writers_append_whole_lines(run: RunFolder) -> None:
    with ToldHistory(run, "c1") as one, ToldHistory(run, "c1") as two:
        for number in range(100):
            (one if number % 2 else two).ack(
                "t", "g", [number], results=["ACKED"], span_ms=(0, 1), outcome=OpOutcome.OK
            )
    lines = [*read(run.histories / "c1.jsonl")]
    assert [line["offsets"] for line in lines] == [[n] for n in range(100)]


def test_run_finds_nodes_by_its_cluster_file(run: RunFolder) -> None:
    with FaultTimeline(run) as faults:
        faults.record("kill", at_ms=5, node="n1")
    nodes = [{"name": "n1", "data": "n1"}, {"name": "n2", "data": "elsewhere/n2"}]
    (run.root / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    found = run.nodes()
    assert found == {"n1": run.root / "n1/log", "n2": run.root / "elsewhere/n2/log"}
    assert [*read(run.faults)] == [{"event": "kill", "at_ms": 5, "node": "n1"}]


def test_run_without_nodes_says_so(run: RunFolder) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither cluster\.json nor"):
        run.nodes()


@pytest.mark.parametrize(
    ("text", "error_ms"), [(None, None), ("{}", None), ('{"clock_error_ms": 0}', 0),
                           ('{"clock_error_ms": 281474976710655}', MS_MAX)],
)  # fmt: skip
def test_run_says_how_far_clocks_differ_or_does_not(
    run: RunFolder, text: str | None, error_ms: int | None
) -> None:
    if text is not None:
        run.about.write_text(text)
    assert run.error_ms(CLOCK_ERROR) == error_ms


@pytest.mark.parametrize("value", ["-1", "281474976710656", "1.5", "true", '"5"', "[]"])
def test_clocks_that_are_no_milliseconds_are_named(run: RunFolder, value: str) -> None:
    run.about.write_text(f'{{"clock_error_ms": {value}}}')
    with pytest.raises(ValueError, match=r"run\.json: clock_error_ms = .*: must be an integer"):
        run.error_ms(CLOCK_ERROR)


@pytest.mark.parametrize("text", ["[]", "5", '{"clock_err', ""])
def test_run_json_that_is_none_is_named(run: RunFolder, text: str) -> None:
    run.about.write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: "):
        run.error_ms(CLOCK_ERROR)


def test_clock_that_was_set_back_makes_no_request_end_before_it_began(run: RunFolder) -> None:
    with ToldHistory(run, "c1") as history:
        history.change("cancel", ids=["a"], results=None, span_ms=(9, 7), outcome=OpOutcome.UNKNOWN)
    (line,) = read(run.histories / "c1.jsonl")
    assert (line["start_ms"], line["end_ms"]) == (9, 9)


@pytest.mark.parametrize(
    "name", ["c.ndjson", "c.jsonl.gz", "_c.jsonl", ".c.parquet", "c", "c.parquet"]
)
def test_history_that_nobody_would_read_is_refused(run: RunFolder, name: str) -> None:
    with pytest.raises(FileNotFoundError, match="no histories"):
        run.history_files()
    for each in ("b.parquet", "a.jsonl"):
        run.histories.mkdir(exist_ok=True)
        (run.histories / each).touch()
    assert [path.name for path in run.history_files()] == ["a.jsonl", "b.parquet"]
    (run.histories / name).mkdir() if name == "c.parquet" else (run.histories / name).touch()
    with pytest.raises(
        ValueError, match=rf"/{re.escape(name)}: must be a file \*\.jsonl or \*\.parquet"
    ):
        run.history_files()


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ([("n1", "n1"), ("n2", "n1")], "must have a name and data of its own"),
        ([("n1", "n1"), ("n2", "./n2/../n1")], "must have a name and data of its own"),
        ([("n1", "n1"), ("n1", "n2")], "must have a name and data of its own"),
        ([], "names no node"),
        ({}, "names no nodes and their data: KeyError"),
        ("{", "names no nodes and their data: JSONDecodeError"),
        ("[1]", "names no nodes and their data: TypeError"),
    ],
)
def test_log_bears_witness_for_one_node(run: RunFolder, listed: Any, said: str) -> None:
    if isinstance(listed, list):
        nodes = [{"name": name, "data": data} for name, data in listed]
        run.cluster_file.write_text(json.dumps({"nodes": nodes}))
    else:
        run.cluster_file.write_text(listed or "{}")
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        run.data()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"event": "kill"}', "at_ms = None: must be an integer, Unix milliseconds"),
        ('{"event": "kill", "at_ms": 1.5}', "at_ms = 1.5: must be an integer"),
        ('{"at_ms": 1}', "event = None: must be a string"),
        ("[]", "must be a JSON object"),
        ("{,}", "not JSON: Expecting"),
    ],
)
def test_line_of_the_timeline_that_is_none_is_named(run: RunFolder, line: str, said: str) -> None:
    assert read_faults(run.faults) == []
    with FaultTimeline(run) as faults:
        faults.record("kill", at_ms=5, node="n1")
    assert len(read_faults(run.faults)) == 1
    run.faults.write_text(run.faults.read_text() + line + "\n")
    with pytest.raises(ValueError, match=rf"faults\.jsonl:2: {re.escape(said)}"):
        read_faults(run.faults)
