"""timerctl's commands about timers by their keys, on a cluster in memory."""

import json

import pytest

from timerclient.cli import timerctl
from timerfake import FakeCluster

BY_KEY = ("--topic", "orders", "--key", "order-1")


def test_timer_of_an_order_is_found_while_it_waits_and_the_error_says_how_to_find_it_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*argv: str) -> tuple[int, str, str]:
        code = timerctl.main(["timers", *argv])
        return code, *capsys.readouterr()

    with FakeCluster() as cluster, cluster.client() as client:
        monkeypatch.setattr(timerctl, "_client", lambda _: cluster.client())
        timer = client.schedule("orders", b"cancel", key="order-1", delay=60)
        code, out, _ = run("story", *BY_KEY)
        assert (code, "SCHEDULED" in out, "pending; the log" in out) == (0, True, True)
        assert json.loads(run("get", *BY_KEY, "-o", "json")[1])["id"] == timer.id
        cluster.advance(60)
        for command in ("get", "story"):
            code, _, err = run(command, *BY_KEY)
            assert (code, "found by its id only" in err) == (1, True)
            assert "(timerctl peek orders)" in err
        assert "FIRED" in run("story", timer.id)[1]
        assert run("story")[0] == 2
        client.create_series("orders", "daily", b"p", every=60)
        occurrence = client.get_series("orders", "daily").timer_id
        assert occurrence
        assert "  series=1  number=1" in run("story", occurrence)[1]
        late, early = ("2030-01-01T00:00:00Z", "2029-01-01T00:00:00Z")
        code, _, err = run("count", "orders", "--from", late, "--to", early)
        wrong = "--to = 2029-01-01T00:00:00+00:00: must be after --from = 2030-01-01T00:00:00.000Z"
        assert (code, err) == (2, f"timerctl: {wrong}\n")


@pytest.mark.parametrize("words", [(), ("timers",)])
def test_timer_is_rescheduled_and_cancelled_by_its_key_with_and_without_the_word_timers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    def run(*argv: str) -> tuple[int, str]:
        code = timerctl.main([*words, *argv, "-o", "json"])
        return code, capsys.readouterr().out

    with FakeCluster() as cluster, cluster.client() as client:
        monkeypatch.setattr(timerctl, "_client", lambda _: cluster.client())
        client.schedule("orders", b"remind", key="order-1", delay=60)
        code, out = run("reschedule", *BY_KEY, "--delay", "2m")
        [moved] = json.loads(out)["results"]
        assert (code, moved["key"], moved["result"]) == (0, "order-1", "RESCHEDULED")
        cluster.advance(60)
        assert client.get_timer(moved["new_id"]).due_ms == moved["due_ms"]
        code, out = run("cancel", *BY_KEY)
        [row] = json.loads(out)["results"]
        assert (code, row["key"], row["result"]) == (0, "order-1", "CANCELLED")
        assert run("cancel", *BY_KEY)[0] == 5
        assert run("cancel")[0] == 2
