"""The protocol of one replica, as texts: tests/replication/scenarios."""

from collections import deque
from pathlib import Path

import pytest

from replication.core.core import Core
from replication.core.core_events import (
    Appointed,
    Durable,
    Effects,
    Event,
    Handover,
    Proposed,
    Received,
    Reconnected,
    Tick,
)
from replication.core.invariants import check_invariants
from replication.core.log_shape import LogShape
from replication.core.peer_messages import (
    Append,
    AppendAnswer,
    Behind,
    Conflict,
    Fence,
    FenceAnswer,
    Fetch,
    FetchAnswer,
    LogStart,
    Message,
    Refused,
    Release,
)
from replication.core.progress import EARLIER_NONCES_MAX, Progress
from replication.core.promise import NO_PROMISE, Promise
from replication.core.replication_config import ReplicationConfig
from tests.datadriven import run_file
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
SIZE = 100
ME = ReplicaId(1)
NONCE = Nonce(7)
VOTERS = frozenset(map(ReplicaId, (1, 2, 3)))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, rewrite: bool) -> None:
    run_file(path, Player().play, rewrite=rewrite)


def test_follower_knows_when_it_last_had_all_that_is_committed() -> None:
    player, found = Player(), []
    for line in (
        "new log=1@1..5 promise=2:2:20",
        "at 10 from 2 append 2:2:20 prev=1:5 commit=9",  # and the entries do not come
        "at 20 from 2 append 2:2:20 prev=1:5 commit=5",
        "at 30 from 2 append 2:2:20 prev=1:9 commit=9",  # differs from this log
    ):
        player.play(line)
        found.append(player.core.caught_up_ms)
    assert found == [None, None, 20, 20]


def test_leader_of_before_has_all_up_to_its_end() -> None:
    player = appointed("at 9000 from 2 append 3:2:20 prev=2:7 commit=7")  # and this log ends at 6
    assert player.core.leader == ReplicaId(2)
    assert player.core.caught_up_ms == 9_000


def test_entries_stay_in_memory_for_a_while_and_no_longer() -> None:
    keep_ms = ReplicationConfig().cache_ms
    durable = ("at 601 durable 6", "at 602 from 2 answer 2:1:7 prev=5 durable=6 echo=601")
    player = appointed(*durable)
    kept = []
    for now_ms in (603, 599 + keep_ms, 601 + keep_ms, 599 + 2 * keep_ms, 602 + 2 * keep_ms):
        player.play(f"at {now_ms} tick")
        kept.append(len(player.core.tail))
    assert kept == [1, 1, 1, 1, 0]


def test_entries_that_are_not_committed_stay_in_memory_and_count() -> None:
    player, keep_ms = appointed("at 601 durable 6"), ReplicationConfig().cache_ms
    for now_ms in range(700, 3 * keep_ms, 90):
        player.play(f"at {now_ms} from 2 answer 2:1:7 prev=5 durable=5 echo={now_ms}")
    assert len(player.core.tail) == 1
    assert player.core.uncommitted_bytes == SIZE


class ThinLink:
    """The way of a leader's messages to replica 2: one after the other, at so many bytes a ms.

    A message and its answer take `travel_ms` more.
    """

    def __init__(self, core: Core, bytes_per_ms: float, travel_ms: int) -> None:
        self.core, self.now_ms, self._bytes_per_ms = core, 0, bytes_per_ms
        self.travel_ms = travel_ms
        self._sizes = [0] * (core.shape.last_index + 1)
        self._free_ms = 0.0
        self._way: deque[tuple[float, Append]] = deque()
        self._beside: deque[tuple[float, Append]] = deque()
        self._durable = core.shape.last_index
        self.carried = 0

    def step(self, now_ms: int, event: Event) -> None:
        self.now_ms = now_ms
        effects = self.core.step(MonoMs(now_ms), event)
        for out in effects.send:
            if out.to == 2 and isinstance(out.message, Append):
                prev, last = out.message.prev_index, out.message.last_index
                size = 100 + sum(self._sizes[prev + 1 : last + 1])
                self._free_ms = max(now_ms, self._free_ms) + size / self._bytes_per_ms
                self._way.append((self._free_ms + self.travel_ms, out.message))
        for out in effects.overtake:
            if out.to == 2 and isinstance(out.message, Append):
                self._beside.append((now_ms + self.travel_ms, out.message))

    def propose(self, sizes: list[int]) -> None:
        self.step(self.now_ms, Proposed(sizes))
        self._sizes += sizes
        self.step(self.now_ms, Tick())
        self.step(self.now_ms, Durable(self.core.version, self.core.shape.last_index))

    def deliver(self) -> None:
        """Answer the messages that have arrived by now."""
        ways = self._beside, self._way
        while came := [way for way in ways if way and way[0][0] <= self.now_ms]:
            append = came[0].popleft()[1]
            self.carried += sum(self._sizes[append.prev_index + 1 : append.last_index + 1])
            self._durable = max(self._durable, append.last_index)
            answer = AppendAnswer(
                under=append.under,
                nonce=Nonce(20),
                prev_index=append.prev_index,
                matched_index=self._durable,
                durable_index=self._durable,
                conflict=None,
                fenced_by=Epoch(0),
                echo_ms=append.sent_ms,
                waited_ms=0,
            )
            self.step(self.now_ms, Received(ReplicaId(2), answer, UnixMs(0), []))


def thin_link(bytes_per_ms: int, travel_ms: int) -> ThinLink:
    """Return the link of a leader that serves since 601."""
    answer = f"at {601 + travel_ms} from 2 answer 2:1:7 prev=5 durable=6 echo=601"
    player = appointed("at 601 durable 6", answer)
    return ThinLink(player.core, bytes_per_ms, travel_ms)


@pytest.mark.parametrize(
    ("bytes_per_ms", "travel_ms"), [(1_000, 0), (6_250, 0), (6_250, 150), (60_000, 0), (60_000, 90)]
)
def test_leader_keeps_its_lease_while_more_is_proposed_than_a_link_carries(
    bytes_per_ms: int, travel_ms: int
) -> None:
    link = thin_link(bytes_per_ms, travel_ms)
    for now_ms in range(800, 10_800):
        link.step(now_ms, Tick())
        link.deliver()
        assert link.core.holds_lease(MonoMs(now_ms)), now_ms
        if link.core.uncommitted_bytes < 24 << 20:
            link.propose([30_000] * 20)
    assert link.carried > 0.65 * 10_000 * bytes_per_ms


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("travel_ms", [60, 140])
def test_window_is_wide_again_some_seconds_after_a_link_has_become_longer(
    travel_ms: int, *, idle: bool
) -> None:
    link, before = thin_link(30_000, 1), 0
    for now_ms in range(800, 18_800):
        link.travel_ms = 1 if now_ms < 4_000 else travel_ms
        link.step(now_ms, Tick())
        link.deliver()
        assert link.core.holds_lease(MonoMs(now_ms)), now_ms
        if link.core.uncommitted_bytes < 24 << 20 and not (idle and 4_000 <= now_ms < 12_000):
            link.propose([30_000] * 20)
        if now_ms == 14_000:
            before = link.carried
    assert link.carried - before > 0.5 * 4_800 * 30_000


def test_leader_keeps_its_lease_while_a_large_entry_takes_the_link_for_longer() -> None:
    link = thin_link(5_000, 1)
    link.step(800, Tick())
    link.propose([100])
    assert link.core.timed_index == link.core.shape.last_index == 7
    link.propose([30 << 20])
    assert link.core.timed_index == 6, "the link takes the time, so no disk is judged by it"
    for now_ms in range(800, 8_000):
        link.step(now_ms, Tick())
        link.deliver()
        assert link.core.holds_lease(MonoMs(now_ms)), now_ms
    assert link.core.commit_index == link.core.shape.last_index


class Player:
    """Replica 1 of voters 1, 2, 3, in the process with nonce 7; peers have nonce 10 x their id.

    new log=E@I,E@I..LAST promise=E:L:N   what a start finds: epochs, where they begin, the end;
                                          E@I/V+V+V where other voters begin
        founders=V+V+V                    who votes before the first of them; else 1, 2 and 3
    at T EVENT                            see `_event`
    drop INDEX BEYOND                     the log below INDEX; below BEYOND also what others lack
    """

    core: Core

    def play(self, line: str) -> str:
        words = line.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        if words[0] == "new":
            self._new(named, unsure="unsure" in words)
            return str(self.core)
        if words[0] == "drop":
            first = self.core.drop_before(LogIndex(int(words[1])), LogIndex(int(words[2])))
            return f"the log begins at {first}"
        now_ms = MonoMs(int(words[1]))
        effects = self.core.step(now_ms, self._event(words[2:], named))
        lines = self._effects(effects)
        if effects.start is not None:
            self.core.set_start_size(SIZE)
            lines += self._effects(self.core.step(now_ms, Tick()))
        if self.core.takes_last_entries:
            self.core.end_proposals()
            lines += self._effects(self.core.step(now_ms, Tick()))
        check_invariants(self.core)
        lease = " lease" if self.core.holds_lease(now_ms) else ""
        return "\n".join([*lines, f"{self.core}{lease}"])

    def _new(self, named: dict[str, str], *, unsure: bool) -> None:
        founders = frozenset(
            ReplicaId(int(each)) for each in named.get("founders", "1+2+3").split("+")
        )
        shape = LogShape(LogIndex(0), Epoch(0), founders, LogIndex(0))
        if "log" in named:
            runs, last = named["log"].split("..")
            starts = [_start(run) for run in runs.split(",")]
            shape.extend(LogIndex(int(last)), starts)
        self.core = Core(
            me=ME,
            nonce=NONCE,
            conf=ReplicationConfig(),
            promise=_promise(named["promise"]) if "promise" in named else NO_PROMISE,
            unsure=unsure,
            shape=shape,
            commit_index=LogIndex(int(named.get("commit", 0))),
            now_ms=MonoMs(0),
        )

    def _event(self, words: list[str], named: dict[str, str]) -> Event:
        match words[0]:
            case "appointed":
                voters = (
                    frozenset(map(int, named["voters"].split(","))) if "voters" in named else ()
                )
                proposed = frozenset(map(ReplicaId, voters)) or None
                return Appointed(Epoch(int(words[1])), ReplicaId(int(words[2])), proposed)
            case "durable":
                return Durable(self.core.version, LogIndex(int(words[1])))
            case "propose":
                return Proposed([SIZE] * int(words[1]))
            case "handover":
                return Handover()
            case "met":
                return Reconnected(ReplicaId(int(words[1])))
            case "tick":
                return Tick()
            case "from":
                sender = ReplicaId(int(words[1]))
                message = _message(sender, words[2:], named)
                count = 0
                if isinstance(message, Append | FetchAnswer):
                    count = message.last_index - message.prev_index
                return Received(sender, message, UnixMs(0), [SIZE] * count)
            case _:
                pass
        raise ValueError(words)

    def _effects(self, effects: Effects) -> list[str]:
        out: list[str] = []
        if effects.persist is not None:
            promise = effects.persist.promise
            out.append(
                f"persist {promise.epoch}:{promise.leader}:{promise.nonce}"
                f"{' unsure' if effects.persist.unsure else ''}"
            )
        if effects.truncate_after is not None:
            out.append(f"truncate after {effects.truncate_after}")
        if effects.append is not None:
            out.append(f"append {effects.append[0]}..{effects.append[1]}")
        if effects.start is not None:
            voters = ",".join(map(str, sorted(effects.start.voters)))
            changed = f" voters={voters}" if effects.start.voters != VOTERS else ""
            out.append(f"append EPOCH {effects.start.epoch} at {effects.start.index}{changed}")
        out += [f"read {read.first}..{read.last} for {read.peer}" for read in effects.read]
        out += ["behind: fetch a snapshot"] if effects.behind else []
        out += ["forgotten: take no part"] if effects.forgotten else []
        return out + [f"-> {to} {_brief(message)}" for to, message in effects.send]


def appointed(*lines: str) -> Player:
    """Return a player whose node is appointed at 600, fences node 2 at 601, and sees the lines."""
    player = Player()
    for line in (
        "new log=1@1..5 promise=1:2:20",
        "at 600 appointed 2 1",
        "at 601 from 2 fence-answer 2:1:7 end=1:5",
        *lines,
    ):
        player.play(line)
    return player


def _message(sender: ReplicaId, words: list[str], named: dict[str, str]) -> Message:
    under = _promise(words[1])
    match words[0]:
        case "fence":
            last_epoch = Epoch(int(named.get("log", 0)))
            return Fence(under=under, last_epoch=last_epoch, sent_ms=MonoMs(0))
        case "behind":
            return Behind(under=under, to_nonce=Nonce(int(named.get("to", NONCE))))
        case "release":
            return Release(under=under)
        case "refused":
            return Refused(under=under, promise=_promise(words[2]))
        case "fence-answer":
            epoch, index = map(int, named["end"].split(":"))
            return FenceAnswer(
                under=under,
                last_epoch=Epoch(epoch),
                last_index=LogIndex(index),
                unsure="unsure" in words,
                sets=tuple(map(_start, named.get("sets", "0@0").split(","))),
                echo_ms=MonoMs(0),
                waited_ms=0,
            )
        case "append":
            epoch, index = map(int, named["prev"].split(":"))
            return Append(
                under=under,
                sent_ms=MonoMs(int(named.get("sent", 0))),
                to_nonce=Nonce(int(named.get("to", 0))),
                prev_epoch=Epoch(epoch),
                prev_index=LogIndex(index),
                last_index=LogIndex(int(named.get("last", index))),
                starts=tuple(map(_start, filter(None, named.get("starts", "").split(",")))),
                commit_index=LogIndex(int(named.get("commit", 0))),
                kept_from=LogIndex(0),
            )
        case "answer":
            durable = LogIndex(int(named.get("durable", 0)))
            conflict = named.get("conflict")
            return AppendAnswer(
                under=under,
                nonce=Nonce(int(named.get("nonce", sender * 10))),
                prev_index=LogIndex(int(named["prev"])),
                matched_index=LogIndex(int(named.get("matched", durable))),
                durable_index=durable,
                conflict=_conflict(conflict) if conflict else None,
                fenced_by=Epoch(int(named.get("fenced", 0))),
                echo_ms=MonoMs(int(named["echo"])),
                waited_ms=0,
            )
        case "fetch":
            epoch, index = map(int, named["prev"].split(":"))
            return Fetch(under=under, prev_epoch=Epoch(epoch), prev_index=LogIndex(index))
        case "fetch-answer":
            epoch, index = map(int, named["prev"].split(":"))
            conflict = named.get("conflict")
            return FetchAnswer(
                under=under,
                prev_epoch=Epoch(epoch),
                prev_index=LogIndex(index),
                last_index=LogIndex(int(named.get("last", index))),
                starts=tuple(map(_start, filter(None, named.get("starts", "").split(",")))),
                conflict=_conflict(conflict) if conflict else None,
            )
        case _:
            raise ValueError(words)


def _promise(text: str) -> Promise:
    epoch, leader, nonce = map(int, text.split(":"))
    return Promise(Epoch(epoch), ReplicaId(leader), Nonce(nonce))


def _start(text: str) -> LogStart:
    begin, _, named = text.partition("/")
    epoch, index = map(int, begin.split("@"))
    voters = frozenset(ReplicaId(int(voter)) for voter in named.split("+")) if named else VOTERS
    return LogStart(LogIndex(index), Epoch(epoch), voters)


def _conflict(text: str) -> Conflict:
    epoch, first, last = map(int, text.split(":"))
    return Conflict(Epoch(epoch), LogIndex(first), LogIndex(last))


def _brief(message: Message) -> str:
    under = f"{message.under.epoch}:{message.under.leader}:{message.under.nonce}"
    match message:
        case Append():
            span = f"{message.prev_epoch}:{message.prev_index}..{message.last_index}"
            return f"Append {under} ({span}] commit={message.commit_index}"
        case AppendAnswer():
            matched = f"matched={message.matched_index} durable={message.durable_index}"
            fenced = f" fenced by {message.fenced_by}" if message.fenced_by else ""
            if message.conflict is not None:
                c = message.conflict
                return f"AppendAnswer {under} parts: {c.epoch}:{c.first_index}..{c.last_index}"
            return f"AppendAnswer {under} {matched}{fenced}"
        case FetchAnswer():
            if message.conflict is not None:
                c = message.conflict
                return f"FetchAnswer {under} parts: {c.epoch}:{c.first_index}..{c.last_index}"
            span = f"{message.prev_epoch}:{message.prev_index}..{message.last_index}"
            return f"FetchAnswer {under} ({span}]"
        case Fetch():
            return f"Fetch {under} after {message.prev_epoch}:{message.prev_index}"
        case FenceAnswer():
            end = f"end={message.last_epoch}:{message.last_index}"
            return f"FenceAnswer {under} {end}{' unsure' if message.unsure else ''}"
        case Refused():
            p = message.promise
            return f"Refused {under}, promised {p.epoch}:{p.leader}:{p.nonce}"
        case _:
            return f"{type(message).__name__} {under}"


def test_a_leader_remembers_few_earlier_processes_of_a_follower() -> None:
    progress = Progress(LogIndex(1), window=ReplicationConfig().window_bytes)
    for nonce in range(1, 1_000):
        progress.note_nonce(Nonce(nonce), LogIndex(1))
    assert len(progress.earlier_nonces) == EARLIER_NONCES_MAX
    assert Nonce(998) in progress.earlier_nonces


def progress_of(*, full: bool) -> Progress:
    """Return the record of a follower that has the log up to 9, with an idle way of 2 ms."""
    conf = ReplicationConfig()
    progress = Progress(LogIndex(10), window=conf.window_bytes_start, match=LogIndex(9))
    progress.replicate_from(LogIndex(10))
    answer(progress, sent_ms=0, at_ms=2)
    if full:
        progress.note_append(MonoMs(10), LogIndex(10), conf.window_bytes_start)
    return progress


def answer(progress: Progress, *, sent_ms: int, at_ms: int) -> None:
    message = AppendAnswer(
        under=Promise(Epoch(2), ME, NONCE),
        nonce=Nonce(20),
        prev_index=LogIndex(9),
        matched_index=LogIndex(9),
        durable_index=LogIndex(9),
        conflict=None,
        fenced_by=Epoch(0),
        echo_ms=MonoMs(sent_ms),
        waited_ms=0,
    )
    progress.note_answer(MonoMs(at_ms), message, ReplicationConfig())


def test_way_of_an_idle_link_is_measured_although_answers_take_several_heartbeats() -> None:
    progress = progress_of(full=False)
    for now_ms in range(100, 1_000, 10):
        if now_ms % 100 == 0:
            progress.note_append(MonoMs(now_ms), LogIndex(9), 0)
        if now_ms % 100 == 50 and now_ms >= 350:
            answer(progress, sent_ms=now_ms - 250, at_ms=now_ms)
    assert progress.idle_travel_ms == 250
    assert progress.window == ReplicationConfig().window_bytes_start, "no queue, so no cut"


def test_window_grows_by_messages_alone_that_were_sent_after_it_was_full() -> None:
    progress = progress_of(full=True)
    window = progress.window
    answer(progress, sent_ms=10, at_ms=12)
    assert progress.window == window
    progress.renewals.append(MonoMs(20))  # it overtakes the entries
    answer(progress, sent_ms=20, at_ms=22)
    assert progress.window == window
    answer(progress, sent_ms=21, at_ms=23)
    assert progress.window == 2 * window


def test_an_append_takes_at_most_half_of_the_window_from_memory_and_from_the_log() -> None:
    link = thin_link(1_000, 0)
    core = link.core
    link.step(800, Tick())
    core.step(MonoMs(800), Proposed([10_000] * 400))
    half = ReplicationConfig().window_bytes_start // 2
    for out in core.step(MonoMs(800), Tick()).send:
        assert isinstance(out.message, Append)
        assert 10_000 * (out.message.last_index - out.message.prev_index) <= half
    core.step(MonoMs(800), Proposed([1 << 20] * 40))  # more than is kept in memory
    core.step(MonoMs(801), Durable(core.version, core.shape.last_index))
    reads = core.step(MonoMs(802), Reconnected(ReplicaId(3))).read
    progress = core._progress[ReplicaId(3)]
    progress.replicate_from(LogIndex(7))
    reads += core.step(MonoMs(803), Tick()).read
    assert [read.limit_bytes for read in reads] == [half]


def test_an_answer_to_a_fetch_is_read_with_its_own_limit() -> None:
    player = Player()
    player.play("new log=1@1..4 promise=1:2:20")
    under = Promise(Epoch(2), ReplicaId(2), Nonce(20))
    player.play("at 600 from 2 fence 2:2:20 end=1:4")
    fetch = Fetch(under=under, prev_epoch=Epoch(1), prev_index=LogIndex(2))
    effects = player.core.step(MonoMs(601), Received(ReplicaId(2), fetch, UnixMs(0), []))
    assert [read.limit_bytes for read in effects.read] == [ReplicationConfig().fetch_bytes]
