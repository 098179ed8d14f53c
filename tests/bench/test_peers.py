"""The contest with a peer in memory, whose faults are known."""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.bench_results import ResultHead
from bench.feed import PAYLOAD_SIZE
from bench.measure import Form
from bench.peers import __main__ as peers
from bench.peers import peer_report, plots
from bench.peers.contest import Contest, Length, PeerResult
from bench.peers.contestants import OURS, ROSTER
from bench.peers.deliveries import Deliveries, NumberedTimers, now_ms
from bench.peers.outcome import ContestOutcome, PeerTurn
from bench.peers.peer import Peer, Receipts
from bench.peers.server import PeerError, PeerServer

pytestmark = pytest.mark.usefixtures("soon")
TINY = Length(
    singles_s=0.2, ingest=2_000, ingest_s=5, lateness_s=0.1, bursts=(2_000,), failover_s=5
)

HEAD = ResultHead(
    utc="20260301T120000Z",
    commit="1a2b3c4",
    form=Form.SHORT,
    machine={"cores": 2, "cpu": "fast", "kernel": "6", "fdatasync_ms": 0.2},
)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.contest.AHEAD_S", 0.8)


OF_BURSTS = ("s", "first_ms", "early", "doubled", "lost")
ABSENT = {"burst_1000000_s", *(f"burst_100000_{name}" for name in OF_BURSTS)}


class FakePeer(Peer):
    """Keeps timers in a dict. It loses, doubles and hurries as its attributes tell it to."""

    title = "fake"
    lacks = ("durable",)
    lost = doubled = hurried_ms = 0
    """Of each call's timers: the number lost, doubled; and ms by which all are early."""

    @classmethod
    def install(cls) -> str:
        return "1"

    async def start(self) -> None:
        self._pending: list[tuple[int, bytes]] = []

    async def close(self) -> None:
        pass

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        await asyncio.sleep(0)
        self._pending.append((due_ms, payload))

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        await asyncio.sleep(0)
        timers = list(zip(due_ms, payloads, strict=True))
        self._pending += timers[self.lost :] + timers[len(timers) - self.doubled :]

    async def consume(self, receipts: Receipts) -> None:
        while True:
            if due := self.due():
                receipts.received(due)
                receipts.acked(len(due))
            await asyncio.sleep(0.001)

    def due(self) -> list[bytes]:
        now = now_ms() + self.hurried_ms
        due = [payload for due_ms, payload in self._pending if due_ms <= now]
        self._pending = [timer for timer in self._pending if timer[0] > now]
        return due


class StandbyPeer(FakePeer):
    """After the kill, nothing is delivered for 300 ms and until two calls have failed."""

    fails_over = True
    failed = 2
    back_ms = 0.0

    async def start(self) -> None:
        await super().start()
        self.delivering = asyncio.Event()

    @property
    def down(self) -> bool:
        return self.failed < 2 or now_ms() < self.back_ms

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        if self.down:
            self.failed += 1
            raise PeerError("no leader")
        await super().schedule_many(due_ms, payloads)

    def due(self) -> list[bytes]:
        due = [] if self.down else super().due()
        if due:
            self.delivering.set()
        return due

    async def kill_leader(self) -> None:
        await self.delivering.wait()
        self.failed, self.back_ms = 0, now_ms() + 300


async def contest(directory: Path, **faults: int) -> PeerResult:
    peer = FakePeer(directory)
    for name, value in faults.items():
        setattr(peer, name, value)
    await peer.start()
    turn = Contest(peer, TINY)
    await turn.ingest()
    await turn.lateness(10_000)
    return turn.result


async def test_a_faultless_peer_has_every_figure(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path)
    await peer.start()
    result = await Contest(peer, TINY).run()
    assert result.errors == []
    figures = {
        name for column in (*peer_report.SPEED, *peer_report.FIRING) for name in column.figures
    }
    assert figures - result.figures.keys() == ABSENT
    faults = [f"{kind}_{rate}" for kind in ("early", "lost", "doubled") for rate in (2_000, 10_000)]
    assert {result.figures[name] for name in faults} == {0}
    assert 0 <= result.figures["late_2000_p50_ms"] < 1_000


async def test_a_doubled_timer_is_found(tmp_path: Path) -> None:
    result = await contest(tmp_path, doubled=3)
    assert (result.figures["doubled_10000"], result.figures["lost_10000"]) == (3, 0)


def test_a_message_of_an_earlier_measure_is_doubled_and_no_message_of_the_later() -> None:
    earlier, timers = Deliveries(), NumberedTimers()
    old, new = timers.make([1_000]), timers.make([2_000])
    earlier.scheduled(old)
    earlier.received(old)
    later = Deliveries(earlier)
    later.scheduled(new)
    later.received(old)
    assert later.first_ms() == 0
    assert len(later.lateness_ms()) == 0
    later.received(new)
    assert later.first_ms() > 0
    assert later.verdict().doubled == 1


async def test_a_lost_timer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.deliveries._POLL_S", 0.01)
    result = await contest(tmp_path, lost=2)
    assert (result.figures["lost_10000"], result.figures["doubled_10000"]) == (2, 0)


async def test_a_burst_that_is_not_whole_has_no_time_of_its_last_ack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.deliveries._POLL_S", 0.01)
    peer = FakePeer(tmp_path)
    peer.lost = 2
    await peer.start()
    turn = Contest(peer, TINY)
    await turn.burst(100)
    assert turn.result.figures["burst_100_lost"] == 2
    assert "burst_100_s" not in turn.result.figures


async def test_a_failover_counts_failed_calls_and_the_time_without_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.contest.KILL_AFTER_S", 0.2)
    monkeypatch.setattr("bench.peers.contest.FAILOVER_AHEAD_MS", 100)
    peer = StandbyPeer(tmp_path)
    await peer.start()
    turn = Contest(peer, replace(TINY, failover_s=0.6))
    await turn.failover()
    figures = turn.result.figures
    assert {column.figures[0] for column in peer_report.FAILOVER} <= figures.keys()
    assert 200 <= figures["failover_failed_calls"] < 1_200
    assert figures["failover_scheduled"] == 1_200 - figures["failover_failed_calls"]
    assert figures["failover_gap_ms"] >= 300
    assert (figures["failover_lost"], figures["failover_doubled"]) == (0, 0)


async def test_a_measure_that_hangs_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(FakePeer):
        async def schedule_one(self, due_ms: int, payload: bytes) -> None:
            await asyncio.Event().wait()

        async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("bench.peers.contest.PART_LIMIT_S", 0.1)
    peer = Hanging(tmp_path)
    await peer.start()
    result = await Contest(peer, TINY).run()
    measures = ("singles", "ingest", "lateness 2000", "lateness 10000", "burst 2000")
    assert result.errors == [f"{name}: TimeoutError: " for name in measures]


async def test_a_consumer_that_fails_fails_the_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(FakePeer):
        async def consume(self, receipts: Receipts) -> None:
            raise PeerError("connection lost")

    monkeypatch.setattr("bench.peers.deliveries._POLL_S", 0.01)
    peer = Broken(tmp_path)
    await peer.start()
    with pytest.raises(PeerError, match="connection lost"):
        await Contest(peer, TINY).burst(100)


async def test_a_consumer_that_loses_a_cancellation_is_ended(tmp_path: Path) -> None:
    class Deaf(FakePeer):
        async def consume(self, receipts: Receipts) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await super().consume(receipts)
            await super().consume(receipts)

    peer = Deaf(tmp_path)
    await peer.start()
    turn = Contest(peer, TINY)
    await asyncio.wait_for(turn.burst(100), 20)
    assert turn.result.figures["burst_100_lost"] == 0


async def test_a_measure_is_left_out_if_its_timers_take_too_long_to_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.contest.PREPARE_LIMIT_S", 0.5)
    peer = FakePeer(tmp_path)
    await peer.start()
    with pytest.raises(PeerError, match="left out: scheduling would take 2 s"):
        await Contest(peer, TINY).burst(2_000)  # at 1,000 a second, until the ingest is measured


async def test_a_peer_takes_its_turn_after_ours_and_one_that_does_not_start_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    class Hanging(FakePeer):
        async def start(self) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None:
            closed.append(self)

    async def run(turn: Contest) -> PeerResult:
        return PeerResult({"single_per_s": 1.0})

    classes = {OURS: FakePeer, "hanging": Hanging, "fake": FakePeer}
    monkeypatch.setattr(peers, "peer_class", classes.__getitem__)
    monkeypatch.setattr(peers, "PART_LIMIT_S", 0.05)
    monkeypatch.setattr(Contest, "run", run)
    outcome = ContestOutcome(head=HEAD, versions=dict.fromkeys(classes, "1"))
    path = tmp_path / "outcome.json"
    await peers._turns(outcome, 1, TINY, path)
    turns = ContestOutcome.load(path).turns
    assert [turn.peer for turn in turns] == [OURS, "hanging", OURS, "fake"]
    assert [turn.result.errors for turn in turns] == [[], ["start: TimeoutError: "], [], []]
    assert len(closed) == 1


def test_processes_that_a_server_leaves_behind_are_ended(tmp_path: Path) -> None:
    server = PeerServer(["sh", "-c", "sleep 600 & exec sleep 0"], tmp_path / "log")
    with pytest.raises(PeerError, match="no port 1 "):
        asyncio.run(server.ready(1))
    assert server.resident_bytes() > 0
    server.kill()
    server.kill()
    until = time.monotonic() + 10
    while server.resident_bytes():
        assert time.monotonic() < until
        time.sleep(0.01)


async def test_an_early_timer_is_found(tmp_path: Path) -> None:
    result = await contest(tmp_path, hurried_ms=5_000)
    assert result.figures["early_10000"] == 1_000


def test_only_scheduled_timers_are_judged_and_lateness_needs_a_punctual_call() -> None:
    seen, timers = Deliveries(), NumberedTimers()
    long_due = round(now_ms()) - 60_000
    known, late_call, failed = (timers.make([due]) for due in (long_due + 120_000, long_due, 1))
    seen.scheduled(known)
    seen.scheduled(late_call)
    for payloads in (late_call, failed, failed):
        assert len(payloads[0]) == PAYLOAD_SIZE
        seen.received(payloads)
    verdict = seen.verdict()
    assert (verdict.scheduled, verdict.lost, verdict.late, verdict.worst_ms) == (2, 1, 0, 0)
    assert verdict.doubled == 1


def test_a_timer_is_late_if_it_comes_more_than_a_second_after_its_due_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at(ms: float) -> None:
        monkeypatch.setattr("bench.peers.deliveries.now_ms", lambda: ms)

    at(0)
    seen, timers = Deliveries(), NumberedTimers()
    punctual, late = timers.make([1_000]), timers.make([2_000])
    seen.scheduled([*punctual, *late])
    at(2_000)
    seen.received(punctual)
    at(3_001)
    seen.received(late)
    verdict = seen.verdict()
    assert (verdict.late, verdict.worst_ms, verdict.early, verdict.lost) == (1, 1_001, 0, 0)


def test_the_longest_gap_is_the_one_that_ends_after_the_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, timers = Deliveries(), NumberedTimers()
    for at_ms in (0, 900, 1_000, 1_700, 1_800):
        monkeypatch.setattr("bench.peers.deliveries.now_ms", lambda at=at_ms: float(at))
        seen.received(timers.make([0]))
    assert seen.longest_gap_ms(from_ms=1_000) == 700
    assert seen.per_tenth(900, 200) == [1.0, 1.0]


def test_an_outcome_is_stored_and_its_report_has_ratios_to_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROSTER, "fake", "fake:Fake")
    for module in (peer_report, plots):
        monkeypatch.setattr(module, "peer_class", lambda name: FakePeer)
    rates = {OURS: (100.0, 300.0), "fake": (50.0, 50.0)}
    lost = iter((1.0, 5.0, 2.0, 3.0))
    turns = [
        PeerTurn(
            name,
            PeerResult(
                {"single_per_s": rate, "batched_per_s": 10 * rate, "failover_lost": next(lost)}
            ),
        )
        for pair in zip(*rates.values(), strict=True)
        for name, rate in zip(rates, pair, strict=True)
    ]
    outcome = ContestOutcome(
        head=HEAD,
        versions={OURS: "1a2b3c4", "fake": "5:1-2"},
        left_out={"absent": "mvn is needed"},
        turns=turns,
    )
    path = tmp_path / "outcome.json"
    outcome.save(path)
    assert json.loads(path.read_text())["turns"][1]["peer"] == "fake"
    text = peer_report.write(tmp_path, "peers", [ContestOutcome.load(path)]).read_text()
    assert "| fake (1-2) | 50 (0.25x) | 500 (0.25x) |" in text
    assert "| fake | 2 |\n| fake (1-2) | 5 |" in text  # of the worst turn
    assert "- fake: durable." in text
    assert "mvn is needed" in text
    svg = (tmp_path / "peers-rates.svg").read_text()
    assert svg.count("<circle") == 2 + 8  # the legend, and two figures of four turns


def test_payloads_carry_their_number_and_due_time() -> None:
    timers = NumberedTimers()
    timers.make([5])
    [payload] = timers.make([7])
    number, due_ms = np.frombuffer(payload[:16], "<u8")
    assert (number, due_ms) == (1, 7)
