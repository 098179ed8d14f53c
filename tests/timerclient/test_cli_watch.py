"""`--watch`, `timerctl top` and colours: frames on a terminal and elsewhere."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.timerclient.conftest import Ctl, Threaded
from timerclient.cli import cli_watch, screen, timerctl
from timerclient.cli.cli_top import ClusterSample, group_rows, node_rows, rate, topic_rows
from timerclient.proto import timer_pb2 as pb

Stop = Callable[[int], None]
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
from timerclient.cli import timerctl
sys.exit(timerctl.main())
"""


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Let the nth wait between two frames of --watch be Ctrl-C."""

    def set_up(frames: int) -> None:
        waits = iter(range(frames - 1))

        def sleep(_: float) -> None:
            if next(waits, None) is None:
                raise KeyboardInterrupt

        # Not time's own sleep: other threads of the process call that.
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr(cli_watch, "time", clock)

    return set_up


@pytest.mark.parametrize(
    "command",
    ["status", "topics", "topics list", "groups list", "members", "checkpoint", "check"],
)
def test_watch_appends_frames_until_ctrl_c(ctl: Ctl, stop_after: Stop, command: str) -> None:
    once = ctl(*command.split())[1].splitlines()[0].split()[0]
    stop_after(2)
    code, out, err = ctl(*command.split(), "--watch", "0.1")
    assert (code, err) == (130, "")
    first, second = out.split("\n\nevery 100ms: timerctl ")
    assert first.startswith(f"every 100ms: timerctl {command} --watch 0.1  20")
    assert once in first
    assert once in second
    assert "\x1b" not in out


def test_watch_has_a_line_for_each_document_and_goes_on_after_an_outage(
    ctl: Ctl, stop_after: Stop
) -> None:
    stop_after(2)
    code, out, _ = ctl("status", "--watch", "-o", "json")
    assert (code, [json.loads(line)["leader"] for line in out.splitlines()]) == (130, ["n1"] * 2)
    stop_after(2)
    nowhere = ("--endpoints", "127.0.0.1:1", "--timeout", "100ms")
    code, out, err = ctl("topics", "--watch", *nowhere)
    assert (code, out.count("timerctl: "), err) == (130, 2, "")
    stop_after(1)
    code, out, err = ctl("topics", "--watch", *nowhere, "-o", "json")
    assert (code, out, json.loads(err)["error"]["reason"]) == (130, "", "UNREACHABLE")
    stop_after(2)
    code, out, err = ctl("topics", "describe", "absent", "--watch")
    assert (code, "no such topic" in err) == (1, True)  # no later frame could be better


def test_an_interval_has_limits(ctl: Ctl) -> None:
    for text in ("0", "99ms", "2d", "soon"):
        assert ctl("status", "--watch", text)[0] == 2
    assert screen.interval("0.1") == timedelta(milliseconds=100)


def sample(at_s: float, n: int, **change: Any) -> ClusterSample:
    """A cluster with one reachable node, a topic and a group; `n` of everything."""
    group = pb.GroupStatus(name="g", group_id=5, unacked=n, unacked_lag_ms=90_000)
    topic = pb.TopicStatus(name="t", topic_id=4, scheduled=n, fired=2 * n, queue_end=3 * n)
    topic.groups.append(group)
    node = pb.NodeStatus(name="n1", reachable=True, replica_id=1, role="leader", log_end=9 * n)
    for name, value in ({"scheduled": n, "fired": 2 * n, "applied_index": 8 * n} | change).items():
        setattr(node, name, value)
    down = pb.NodeStatus(name="n2", error="no answer")
    return ClusterSample(at_s, pb.GetStatusResponse(nodes=[node, down]), [topic])


def test_rates_are_of_the_counters_of_two_samples() -> None:
    old, new = sample(1.0, 100), sample(3.0, 200)
    assert node_rows(old, new) == [
        ("n1", "leader", 0, 0, 50.0, 100.0, 400.0, 200, ""),
        ("n2", *[None] * 7, "no answer"),
    ]
    assert topic_rows(old, new) == [("t", 0, 0, 50.0, 100.0, 0.0, 0, "")]
    assert group_rows(old, new) == [("t/g", 200, 0, 0, 100.0, 0, 90_000)]
    assert node_rows(None, new)[0][4:7] == (None, None, None)
    assert node_rows(old, sample(3.0, 200, fired=1))[0][4:6] == (50.0, None)  # it fell: a restart
    assert rate(1, 2, 0.0) is None


def test_top_appends_frames_and_lines(ctl: Ctl, threaded: Threaded) -> None:
    threaded.seed("orders", [b""])
    ctl("groups", "create", "orders", "g")
    code, out, err = ctl("top", "--interval", "0.1", "--frames", "2")
    assert (code, err, out.count("timerctl top, every 100ms")) == (0, "", 2)
    assert max(map(len, out.splitlines())) <= 80
    for heading in ("NODE ", "TOPIC ", "GROUP "):
        assert out.count(f"\n{heading}") == 2
    code, out, _ = ctl("top", "--interval", "0.1", "--frames", "2", "--limit", "1", "-o", "json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, len(lines), len(lines[0]["topics"])) == (0, 2, 1)
    assert lines[0]["nodes"][0]["fired_per_s"] == 0.0
    assert ctl("top", "--frames", "0")[0] == 2


def test_top_takes_the_option_watch_for_its_interval(ctl: Ctl) -> None:
    code, out, err = ctl("top", "--watch", "0.1", "--frames", "2")
    assert (code, err, out.count("timerctl top, every 100ms")) == (0, "", 2)
    assert timerctl.own_parser().parse_args(["top", "--watch"]).interval == timedelta(seconds=2)


def in_terminal(
    argv: list[str], threaded: Threaded, tmp_path: Path, act: Callable[[int, int], None], **env: str
) -> tuple[int, str]:
    """Run timerctl on a pseudo terminal of 80 columns; return its exit status and its output."""
    inner, outer = pty.openpty()
    settings = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "XDG_CONFIG_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *argv],
        stdin=outer,
        stdout=outer,
        stderr=outer,
        env=os.environ | settings | {"TIMERCTL_ENDPOINTS": threaded.cluster.address} | env,
        start_new_session=True,
    )
    os.close(outer)
    text, deadline, acted = b"", time.monotonic() + 60, False
    try:
        while time.monotonic() < deadline:
            if not select.select([inner], [], [], 1)[0]:
                continue
            try:
                text += os.read(inner, 65_536)
            except OSError:  # the process has ended
                break
            if b"n3" in text and not acted:  # a second signal could hit the end of the process
                act(inner, process.pid)
                acted = True
        return process.wait(10), text.decode()
    finally:
        process.kill()
        process.wait()
        os.close(inner)


def test_top_redraws_on_a_terminal_until_q(threaded: Threaded, tmp_path: Path) -> None:
    def press(terminal: int, _: int) -> None:
        os.write(terminal, b"q")

    code, text = in_terminal(["top", "--interval", "0.1"], threaded, tmp_path, press)
    assert code == 0
    assert text.startswith("\x1b[H")
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    assert max(map(len, plain.splitlines())) <= 80
    assert "\x1b[32mleader" in text


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_watch_on_a_terminal_ends_with_ctrl_c(
    threaded: Threaded, tmp_path: Path, term: str
) -> None:
    def interrupt(_: int, pid: int) -> None:
        os.kill(pid, signal.SIGINT)

    argv = ["status", "--watch", "0.1"]
    code, text = in_terminal(argv, threaded, tmp_path, interrupt, TERM=term, NO_COLOR="1")
    assert code == 130
    assert "Traceback" not in text
    assert "\x1b[3" not in text
    assert text.startswith("\x1b[H") is (term == "xterm")
    assert ("\x1b" in text) is (term == "xterm")


def test_colours_are_of_states_and_only_if_wanted(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\x1b" not in ctl("status")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = ctl("status", "--color", "always")[1]
    assert coloured.count("\x1b[32mleader  \x1b[0m") == 1
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == ctl("status", "--color", "never")[1]
    assert "\x1b" not in ctl("status", "--color", "always", "-o", "json")[1]
    assert ctl("status", "--color", "pink")[0] == 2
