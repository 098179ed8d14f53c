"""`timerctl recurring …`, on the cores of the cluster."""

import json
from collections.abc import Iterator

import pytest

from timerclient.cli import timerctl
from timerfake import FakeCluster


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """A cluster in memory, to which timerctl connects."""
    with FakeCluster() as cluster:
        monkeypatch.setattr(timerctl, "_client", lambda _: cluster.client())
        yield cluster


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = timerctl.main(["recurring", *argv])
    return code, *capsys.readouterr()


def test_series_is_created_shown_changed_paused_resumed_and_deleted(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys) == (0, "no series\n", "")
    code, out, err = run(capsys, "create", "orders", "k", "p", "--every", "90s")
    assert (code, err) == (0, "")
    assert "every 90s" in out
    out = run(capsys, "describe", "orders", "k", "--next", "2", "-o", "json")[1]
    document = json.loads(out)
    [series] = document["series"]
    assert (series["every_ms"], series["payload"], series["ended"]) == (90_000, "p", 0)
    assert (len(document["next"]), document["next"][0]) == (2, series["next"])
    code, _, err = run(capsys, "create", "orders", "k", "q", "--every", "90s")
    assert (code, "on_conflict = alter gives" in err) == (1, True), err
    bounds = ("--max-count", "9", "--end", "2100-01-01T00:00Z")
    assert run(capsys, "alter", "orders", "k", *bounds)[0] == 0
    bounded = json.loads(run(capsys, "describe", "orders", "k", "-o", "json")[1])["series"][0]
    assert (bounded["max_count"], bounded["end"]) == (9, "2100-01-01T00:00:00.000Z")
    assert run(capsys, "alter", "orders", "k", "--max-count", "none", "--end", "none")[0] == 0
    shown = run(capsys, "describe", "orders", "k", "-o", "wide")[1].splitlines()[1]
    assert shown.split()[-4:] == ["fire_once", "-", "-", "p"]
    for wrong, why in (((), "give at least one"), (("--max-count", "x"), "invalid int value: 'x'")):
        code, _, err = run(capsys, "alter", "orders", "k", *wrong)
        assert (code, why in err) == (2, True), err
    altered = (
        "create",
        "orders",
        "k",
        "q",
        "--every",
        "90s",
        "--on-conflict",
        "alter",
        "-o",
        "json",
    )
    assert json.loads(run(capsys, *altered)[1])["series"][0]["payload"] == "q"
    cron = ("--cron", "0 9 * * *", "--zone", "Europe/Berlin", "--misfire", "skip")
    assert "0 9 * * * Europe/Berlin" in run(capsys, "alter", "orders", "k", *cron)[1]
    assert "paused" in run(capsys, "pause", "orders", "k")[1]
    assert "paused" not in run(capsys, "resume", "orders", "k")[1]
    assert "orders" in run(capsys, "list")[1]
    code, _, err = run(capsys, "delete", "orders", "k")
    assert (code, "needs --yes without a terminal" in err) == (2, True)
    assert run(capsys, "delete", "orders", "k", "--yes")[:2] == (0, "series k deleted\n")
    assert run(capsys, "list", "orders")[1] == "no series\n"


def test_preview_shows_times_and_wrong_values_are_refused(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ("--start", "2100-01-01T00:00:00+01:00", "--zone", "Europe/Berlin")
    preview = run(capsys, "create", "t", "k", "--cron", "0 9 * * *", *start, "--preview", "2")
    assert preview[1] == "2100-01-01T08:00:00.000Z\n2100-01-02T08:00:00.000Z\n"
    code, _, err = run(capsys, "create", "t", "k", "--cron", "61 * * * *")
    assert (code, "--cron = '61 * * * *'" in err) == (2, True)
    code, _, err = run(capsys, "create", "t", "k", "--every", "60", "--start", "2100-01-01")
    assert (code, "needs a UTC offset" in err) == (2, True)
    code, _, err = run(capsys, "create", "t", "k", "--every", "60", "--end", "soon")
    assert (code, "--end: 'soon' is not an ISO 8601 time" in err) == (2, True)
    code, _, err = run(capsys, "create", "t", "k", "p")
    assert (code, "one of the arguments --every --cron is required" in err) == (2, True), err
    code, _, err = run(capsys, "describe", "t", "absent")
    assert (code, "no such topic" in err) == (1, True)
