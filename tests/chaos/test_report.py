"""The report of an audit: as text, as a page, as an exit status. Without Spark."""

import json
import traceback
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
from pyspark.errors import PySparkException

from chaos.audit import command
from chaos.audit.report import about, page
from chaos.audit.report.figures import FAULT_LATE, PLANES
from chaos.audit.report.report import Report, describe, write
from chaos.history.history import History, RunFolder
from chaos.spark import session
from timer.model.timer_errors import CorruptFileError

OFFENDER = {"verdict": "lost", "id": "id<1>", "mark": 7, "seq": None, "topic": "a & b"}


def summary(**other: Any) -> dict[str, Any]:
    late = {"n": 9, "p50": 1, "p90": 2, "p99": 3, "p999": 4, "max": 5}
    point = {"index": 9, "time_ms": 1, "scheduled": 5, "pending": 1, "fired": 3, "cancelled": 1}
    node = {"node": "n1", "life": 0, "first": 1, "last": 9, "upto": 9, "stale": 0, "diverged": 0}
    gaps: dict[str, Any] = {
        f"{plane}_gap{what}_ms": 120 for plane in PLANES for what in ("", "_after")
    }
    gaps |= {f"{plane}_gap_open": False for plane in PLANES}
    gaps |= {f"{what}_late_{name}_ms": 4711 for what, name in FAULT_LATE}
    columns = ("schedule", "failed", "fire", "deliver", "p50", "p99", "max")
    return {
        "verdict": "VIOLATED",
        "violations": {"lost": 1},
        "verdicts": {"lost": 1, "ok": 4},
        "scheduled": 5, "fired": 3, "cancelled": 1, "dropped": 0, "pending": 1,
        "delivered": 3, "redelivered": 0, "arrived_after_ack": 0,
        "entries": 9, "stale_entries": 0, "nodes": [node], "replayed": {"node": "n1"},
        "offenders": [OFFENDER],
        "files": [], "files_unread": [], "other_offenders": [], "not_looked_at": [],
        "acks_unasked": None, "waits": {"long": 2, "unjudged": 1},
        "fired_answers": {"answers": 9, "unjudged": 4},
        "run": {"failures": [], "left_out": [], "without": [], "not_struck": []},
        "holes": [], "thin": [],
        "operations": [{"op": "cancel", "by": "key", "on_conflict": "", "result": "CANCELLED",
                        "n": 3}],
        "conservation": {
            "checkpoints": 1,
            "last": [{**point, "dropped": 0, "balanced": True}],
            "said": {"nodes": 3, "counts": 20, "digests": 6},
        },
        "lateness_ms": {"fire": {"all": late}, "deliver": {"all": late}},
        "kills": 1, "failovers": 1,
        "leader_kills": {"kills": 3, "longest_without_ms": 17_250, "long_gaps": 2},
        "faults": [{"fault": "kill <n1>", "start_ms": 1500, "healed_after_ms": 1000,
                    "recovered_after_ms": 300, **gaps}],
        "failover_gaps": [{"node": "n1", "epoch": 2, "fired_after_ms": 700}],
        "redeliveries": {"failover": 2},
        "timeline": {"bucket_ms": 1000, "from_ms": 1000, "to_ms": 9000,
                     "bucket": [1000, 2000, 5000], **{name: [1, None, 3] for name in columns}},
        **other,
    }  # fmt: skip


class Page(HTMLParser):
    """What a page is made of; complains of tags that don't close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.paths: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "rect", "line", "path"):
            self.open.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onload"}
        self.paths += [value or "" for name, value in attrs if name == "d"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect",):
            assert self.open.pop() == tag, tag


def test_page_is_whole_and_needs_nothing_else() -> None:
    text = page.html("run <1>", summary(), "verdict: VIOLATED lost=1")
    parsed = Page()
    parsed.feed(text)
    assert parsed.open == []
    assert parsed.tags.count("svg") == 2
    [_, *scrolled] = text.split('<div class="wide">')  # on a phone, as the tables
    assert sum(part.partition("</div>")[0].count("<svg") for part in scrolled) == 2
    assert "script" not in parsed.tags
    assert "://" not in text
    for shown in ("run &lt;1&gt;", "id&lt;1&gt;", "a &amp; b", "kill &lt;n1&gt;", ">violation<"):
        assert shown in text, shown
    assert text.index(">lost<") < text.index(">ok<") < text.index("Not seen: diverged, duplicate")


def test_stroke_breaks_where_nothing_is_known() -> None:
    parsed = Page()
    parsed.feed(page.html("r", summary(), ""))
    # Throughput counts a silent second as 0; lateness has no value there: a new stroke.
    assert [path.count("M") for path in parsed.paths] == [1, 1, 1, 1, 2, 2, 2]


def test_page_of_a_run_without_anything_is_whole() -> None:
    nothing = summary(faults=[], offenders=[], violations={}, redeliveries={}, lateness_ms={})
    nothing["timeline"] = {
        name: [] if isinstance(value, list) else value
        for name, value in nothing["timeline"].items()
    }
    parsed = Page()
    parsed.feed(page.html("r", nothing, ""))
    assert parsed.open == []


BESIDE = {
    "other_offenders": [
        {"verdict": "policy_lost", "topic": "of rules", "told": 2, "logged": 1},
        {"verdict": "nack_lost", "topic": "of nacks", "queue_offset": 8},
        {"verdict": "deposed_handed_out", "topic": "of leases", "epoch": 3},
        {"verdict": "missing_in_files", "node": "n1", "index": 3_000, "seq": 4},
    ],
    "files": [{"node": "n1", "index": 3_000, "pending": 4_000}],
    "files_unread": ["of nobody"],
    "acks_unasked": 1234,
}


def test_page_names_what_is_judged_beside_the_table() -> None:
    told = page.html("r", summary(**BESIDE), "")
    parsed = Page()
    parsed.feed(told)
    assert parsed.open == []
    for text in ("policy_lost, the first 1", "of rules", "nack_lost, the first 1", "of nacks"):
        assert text in told
    for text in ("deposed_handed_out, the first 1", "of leases", "1,234 messages are acked"):
        assert text in told


def test_longest_time_without_a_kill_of_the_leader_is_told() -> None:
    said = (
        "eaders killed: 3; at most 17.2 s without a kill, longer than 15 s 2 times, from the first"
        " fault to the last"
    )
    assert f"l{said}" in describe(Report(summary()))
    assert f"<p>L{said}.</p>" in page.html("r", summary(), "")
    quiet = summary(leader_kills={})
    assert not any("leaders killed" in line for line in describe(Report(quiet)))
    assert "eaders killed" not in page.html("r", quiet, "")


RUN_JSON: dict[str, Any] = {
    "scenario": "mix", "seed": 7, "state": "audited", "machine": {"commit": "0abc<1>"},
    "failures": ["n2 ended by itself", "drain: Traceback\n  line"],
    "left_out": ["not allowed here: fill"], "missing": {"network": "not root", "disks": ""},
    "not_struck": [{"strike": n, "nemesis": "pause", "why": "not come to"} for n in (3, 4)],
}  # fmt: skip


def test_what_a_run_says_of_itself_is_shown_apart_from_the_verdict(tmp_path: Path) -> None:
    RunFolder(tmp_path).about.write_text(json.dumps(RUN_JSON))
    report = Report(summary(run=about.about(RunFolder(tmp_path)), violations={}, verdict="OK"))
    assert report.ok
    assert report.why_bad == "the run itself failed, apart from the promises: 2 failures"
    lines = [*describe(report)]
    assert lines[:4] == [
        "run: mix, seed 7, commit 0abc<1>",
        "left out: not allowed here: fill",
        "without network: not root",
        "not struck: 3 pause, 4 pause: not come to",
    ]
    assert lines[-3:-1] == [
        "the run itself FAILED: n2 ended by itself",
        "the run itself FAILED: drain: Traceback\n      line",
    ]
    assert lines[-1].startswith("verdict: OK ")
    text = page.html("r", report.summary, report.line())
    parsed = Page()
    parsed.feed(text)
    assert parsed.open == []
    for shown in ("mix, seed 7, commit 0abc&lt;1&gt;", "<pre>n2 ended by itself</pre>",
                  "The run itself failed, apart from", "Not struck: 3 pause", ">OK<"):  # fmt: skip
        assert shown in text, shown


def test_run_that_says_nothing_of_itself_is_not_bad(tmp_path: Path) -> None:
    for text in (None, "{}", '{"clock_error_ms": 1}'):
        if text:
            RunFolder(tmp_path).about.write_text(text)
        assert about.about(RunFolder(tmp_path)) == summary()["run"]
    assert [*about.describe(summary()["run"])] == []
    assert about.why_bad(summary()["run"]) == ""


def test_failures_in_another_form_are_named_and_all_else_may_be_anothers(tmp_path: Path) -> None:
    RunFolder(tmp_path).about.write_text(json.dumps({"failures": "none"}))
    with pytest.raises(ValueError, match=r"run\.json: failures = 'none': must be a list"):
        about.about(RunFolder(tmp_path))
    names = ("left_out", "missing", "not_struck", "machine")
    for said in (dict.fromkeys(names, "none"), {"not_struck": ["none"], "failures": None}):
        RunFolder(tmp_path).about.write_text(json.dumps(said))
        assert about.about(RunFolder(tmp_path)) == summary()["run"]


def test_many_strikes_that_did_not_fall_are_told_by_kind(tmp_path: Path) -> None:
    missed = [{"strike": n, "nemesis": "kill" if n % 4 else "flip", "why": "w"} for n in range(11)]
    RunFolder(tmp_path).about.write_text(json.dumps({"not_struck": missed}))
    assert about.about(RunFolder(tmp_path))["not_struck"] == ["11, kill 8, flip 3: w"]


@pytest.mark.usefixtures("no_spark")
def test_exit_status_is_1_if_the_run_itself_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(tmp_path).about.write_text(json.dumps(RUN_JSON))
    kept = Report(summary(run=about.about(RunFolder(tmp_path)), violations={}, verdict="OK"))
    monkeypatch.setattr(command, "audit", lambda _, run, **__: write(run, kept))
    assert command.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("verdict: OK ")
    assert lines[-2] == "the run itself failed, apart from the promises: 2 failures"


@pytest.mark.usefixtures("no_spark")
def test_run_whose_harness_died_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(tmp_path).about.write_text('{"state": "running"}')
    kept = Report(summary(run=about.about(RunFolder(tmp_path)), violations={}, verdict="OK"))
    monkeypatch.setattr(command, "audit", lambda _, run, **__: write(run, kept))
    assert command.main([str(tmp_path)]) == 1
    said = "the harness did not finish: results that its clients waited for may be missing"
    assert said in capsys.readouterr().out.splitlines()
    assert said[1:] in page.html("r", kept.summary, kept.line())


@pytest.mark.usefixtures("no_spark")
def test_history_is_held_against_its_format_unasked_unless_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Report(summary(violations={}, verdict="OK"))
    monkeypatch.setattr(command, "audit", lambda _, run, **__: write(run, kept))
    assert command.main([str(tmp_path)]) == 0
    (RunFolder(tmp_path).histories / "c.jsonl").write_text('{"op": "open"}\n')
    assert command.main([str(tmp_path)]) == 2
    assert "c.jsonl:1: client = nothing: must be" in capsys.readouterr().err
    assert command.main([str(tmp_path), "--no-check-history"]) == 0
    monkeypatch.setattr(command, "CHECKED_SIZE_MAX", 10)
    assert command.main([str(tmp_path)]) == 0
    assert "their format is not checked" in capsys.readouterr().err
    assert command.main([str(tmp_path), "--check-history"]) == 2


def test_fault_that_was_not_recovered_from_is_told() -> None:
    s = summary()
    assert not any("not recovered" in line for line in describe(Report(s)))
    text = page.html("r", s, "")
    assert ">not recovered<" not in text
    assert ">4,711<" in text
    s["faults"][0] |= {"recovered_after_ms": None, "fire_gap_ms": 6500, "fire_gap_open": True}
    lines = [*describe(Report(s))]
    assert "not recovered from kill <n1> at 0.5 s: no fire for 6,500 ms, to the end" in lines
    text = page.html("r", s, "")
    parsed = Page()
    parsed.feed(text)
    assert parsed.open == []
    assert ">not recovered<" in text
    assert ">6,500, to the end<" in text


def test_text_names_the_offenders_and_ends_with_the_verdict() -> None:
    lines = [*describe(Report(summary(**BESIDE)))]
    assert "  verdict=lost id=id<1> mark=7 topic=a & b" in lines
    assert "  verdict=policy_lost topic=of rules told=2 logged=1" in lines
    assert "  verdict=nack_lost topic=of nacks queue_offset=8" in lines
    assert "4 of 9 answers ALREADY_FIRED, close to the firing: not judged" in lines
    assert lines[-1] == (
        "verdict: VIOLATED kills=1 failovers=1 scheduled=5 fired=3 delivered=3 cancelled=1"
        " redelivered=0 lost=1 duplicated=0 early=0"
    )


@pytest.fixture
def no_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    History(RunFolder(tmp_path), "c").close()
    spark = SimpleNamespace(stop=lambda: None)
    monkeypatch.setattr(command, "spark_session", lambda *_, **__: spark)
    monkeypatch.setattr(command, "why_no_java", str)


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("violations", "status"), [({}, 0), ({"lost": 1}, 1), ({"diverged_entries": 2}, 1)]
)
def test_exit_status_is_1_if_a_promise_was_broken(
    violations: dict[str, int], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    report = Report(summary(violations=violations))
    monkeypatch.setattr(command, "audit", lambda _, run, **__: write(run, report))
    assert command.main([str(tmp_path)]) == status
    assert "id=id<1>" in capsys.readouterr().out
    assert (RunFolder(tmp_path).audit / "report.html").exists()


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    "error", [FileNotFoundError("no such"), CorruptFileError(Path("x"), 7, "bad")]
)
def test_exit_status_is_2_if_the_run_cannot_be_audited(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fails(*_: Any, **__: Any) -> Report:
        raise error

    monkeypatch.setattr(command, "audit", fails)
    assert command.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"audit: {error}\n"
    assert command.main([str(tmp_path / "nowhere")]) == 2


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PySparkException("\n Job aborted\n at x"), "PySparkException: Job aborted"),
        (ConnectionRefusedError(111, "the JVM is gone"), "[Errno 111] the JVM is gone"),
        (KeyError("seq"), "KeyError: 'seq'"),
        (RuntimeError(), "RuntimeError: no reason given"),
    ],
)
def test_audit_that_fails_is_no_broken_promise(
    error: Exception, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fails(*_: Any, **__: Any) -> Report:
        raise error

    monkeypatch.setattr(command, "audit", fails)
    assert command.main([str(tmp_path)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("audit: the run could not be judged: ")
    assert line in told
    assert "Traceback" in (RunFolder(tmp_path).audit / "spark.log").read_text()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (None, "no java in JAVA_HOME = "),
        ("echo 'openjdk version \"11.0.2\" 2019-01-15' >&2", 'openjdk version "11.0.2"'),
        ("exit 1", "is silent: Spark needs Java 17"),
        ("echo 'openjdk version \"17.0.15\" 2025-04-15' >&2", ""),
    ],
)
def test_java_is_looked_for_before_any_work(
    script: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def never(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it was tried")

    java = tmp_path / "bin/java"
    java.parent.mkdir()
    if script:
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setattr(command, "spark_session", never)
    History(RunFolder(tmp_path), "c").close()
    assert command.main([str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert (says or "it was tried") in told
    assert told.count("\n") == 1
    assert ("it was tried" in told) == (not says)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")  # spark-submit has a JVM already
    assert session.why_no_java() == ""


@pytest.mark.usefixtures("no_spark")
def test_histories_are_held_against_their_format_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = Report(summary(violations={}))
    monkeypatch.setattr(command, "audit", lambda _, run, **__: write(run, fine))
    with History(RunFolder(tmp_path), "c") as history:
        history.open("t", "g", start_ms=1)
    assert command.main([str(tmp_path), "--check-history"]) == 0
    with History(RunFolder(tmp_path), "c") as history:
        history.open("t", "", start_ms=1)
    assert command.main([str(tmp_path), "--check-history"]) == 2
    assert "c.jsonl:2: group" in capsys.readouterr().err


def test_a_time_zone_that_the_machine_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ZoneInfoNotFoundError) as missing:
        ZoneInfo("Mars/Base")
    lines = traceback.format_exception_only(missing.value)
    failed = PySparkException("Job aborted\n" + "".join(lines) + "\n\tat org.apache")
    assert command._error_line(failed, RunFolder(tmp_path)) == (
        "'No time zone found with key Mars/Base'"
    )


@pytest.mark.usefixtures("no_spark")
def test_jvm_that_has_ended_is_told_though_it_says_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    def fails(*_: Any, **__: Any) -> Any:
        raise Gone

    monkeypatch.setattr(command, "audit", fails)
    monkeypatch.setattr(command, "spark_session", lambda *_, **__: SimpleNamespace(stop=fails))
    assert command.main([str(tmp_path)]) == 2
    said = "audit: the run could not be judged: Gone: Spark's JVM has ended (see "
    assert capsys.readouterr().err.startswith(said)
