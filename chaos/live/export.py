"""The exporter: a running cluster's log as events for the live audit
(chaos/live/exported_events.py).

    python -m chaos.live.export RUN_DIR --into DIR           a local cluster: all its nodes' logs
    python -m chaos.live.export --data n1=D1 n2=D2 --into DIR       the nodes' data directories
    python -m chaos.live.export --data n1=D1 --status HOST:PORT --into DIR     one node, by its word

It tells what the log promises, not what became of it: which timers there are, which of them were
cancelled, how far the log has fired. Nothing of it is computed by applying FIREs: whether a timer
really came is for the witness (chaos/live/witness.py) to say. So its state is a few numbers, some
of each topic (chaos/live/whole_topics.py), and who has which key (chaos/live/holders.py), whatever
the number of timers without one, and it may begin at any node's manifest. What only a table of all
timers could say, or of all that is acked, is excused: whether a timer without a key that is
rescheduled by its id was pending, and of which topic; which messages a MOVE took along.

Its files are `log-<first>-<last>`, by the entries' indexes in 16 hex digits. `export.json` is its
state as of some entry, never after the last file: at a restart the entries between are read
again and not told again. So every event is exported exactly once.
"""

import argparse
import dataclasses
import http.client
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chaos.history.history import RunFolder
from chaos.live import exported_events
from chaos.live.exported_events import EventColumns, EventKind, Outbox
from chaos.live.follow import Divergence, Follower, LogGone
from chaos.live.holders import Ended, Holders, KeyHolder
from chaos.live.whole_topics import Topics
from chaos.oracle.intake_story import IntakeStory
from chaos.oracle.story import MOVED_BYTES_MAX, hashed
from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import AnyOp, DeleteTopic, Move
from timer.files.disk import Disk, RealDisk
from timer.model.columns import I64, U32, RowArray, decode_schedule, gather
from timer.model.timer_errors import StorageError
from timer.model.units import LogIndex
from timer.recovery import manifest

FLUSH_S: Final = 0.5
HEARTBEAT_S: Final = 1.0
STATE_S: Final = 5.0
SAVING_MAX: Final = 20
"""One part in so many of its time goes into saving the state, which grows with pending keys."""
STATE_NAME: Final = "export.json"
PREFIX: Final = "log-"
STATUS_TIMEOUT_S: Final = 2.0
PRUNE_S: Final = 60.0


@dataclass(slots=True)
class ExportStory:
    """What the log has come to, as far as the next entry's events depend on it."""

    index: int = 0
    epoch: int = 0
    since_ms: int = 0
    """When the epoch began."""
    time_ms: int = 0
    read_ms: int = 0
    """Greatest read time of a FIRE; one that reached its limit may have fired less."""
    first_seq: int = 1
    """The first timer that this export tells of."""
    next_seq: int = 1
    topics: Topics = field(default_factory=Topics)
    intake: IntakeStory = field(default_factory=IntakeStory)
    holders: Holders = field(default_factory=lambda: Holders(whole=True))
    begins: list[list[Any]] = field(default_factory=list)
    """What was so before the first entry, as (kind, columns) of events, until it is told."""

    def __post_init__(self) -> None:
        """Let the holders see how far topics have fired that are paused."""
        self.holders.stands = self.topics.stands
        self.holders.read_ms = self.read_ms

    @classmethod
    def at_manifest(cls, folder: Path, disk: Disk) -> "ExportStory":
        """Return the story at the manifest in `folder`; the log's beginning without one.

        Raises:
            StorageError: the manifest is damaged, or of another version.
        """
        state = manifest.read(disk, folder)
        if state is None:
            return cls()
        topics = Topics.of_manifest(state)
        return cls(
            index=state["index"],
            epoch=state["epoch"],
            since_ms=state["time_ms"],
            time_ms=state["time_ms"],
            read_ms=state["last_read_time_ms"],
            first_seq=state["next"][0],
            next_seq=state["next"][0],
            topics=topics,
            begins=[[int(told.kind), told.columns] for told in topics.facts(state)],
            intake=IntakeStory.of_manifest(state),
            holders=Holders(whole=state["next"][0] == 1),
        )

    @classmethod
    def loads(cls, text: str) -> "ExportStory":
        """Return what `dumps` wrote.

        Raises:
            ValueError: another version wrote it.
        """
        fields = json.loads(text)
        if "intake" not in fields:
            raise ValueError(f"{STATE_NAME} is of an older version: name another folder")
        holders = Holders(whole=fields["first_seq"] == 1)
        holders.loads(fields["holders"])
        topics, intake = Topics.loads(fields["topics"]), IntakeStory.loads(fields["intake"])
        return cls(**fields | {"holders": holders, "topics": topics, "intake": intake})

    def dumps(self) -> str:
        """Return the story as JSON."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        parts = ("holders", "topics", "intake")
        return json.dumps(plain | {name: plain[name].dumps() for name in parts})

    def apply(self, item: Entry) -> list[EventColumns]:
        """Take in the next entry; return its events."""
        assert item.index == self.index + 1, (item.index, self.index)
        self.index, self.time_ms = item.index, max(self.time_ms, item.time_ms)
        self.topics.move_on(item, new_epoch=item.kind is EntryKind.EPOCH)
        match item.kind:
            case EntryKind.EPOCH:
                self.epoch, self.since_ms = item.epoch, item.time_ms
            case EntryKind.TOPIC:
                return self._topic(item)
            case EntryKind.FIRE:
                self.read_ms = max(self.read_ms, payloads.decode_fire(item.payload).read_time_ms)
                self.holders.read_ms = self.read_ms
            case EntryKind.SCHEDULE:
                return self._schedule(item)
            case EntryKind.RESCHEDULE:
                return self._reschedule(item)
            case EntryKind.CANCEL:
                return self._cancel(item)
            case EntryKind.GROUP:
                ops = payloads.decode_group(item.payload)
                return [told for op in ops for told in self._op(item, op)]
            case EntryKind.POLICY:
                return self.topics.policy(item, self.read_ms, self.next_seq)
            case EntryKind.PRODUCER:
                self.intake.producer(item)
            case EntryKind.CHECKPOINT:
                self.intake.checkpoint(item)
        return []

    def _topic(self, item: Entry) -> list[EventColumns]:
        said = payloads.decode_topic(item.payload)
        if not isinstance(said, DeleteTopic):
            return self.topics.make(item, said, self.read_ms)[1]
        told = self.topics.delete(item, said)
        if told:
            self.holders.forget(said.topic)
        return told

    def _schedule(self, item: Entry) -> list[EventColumns]:
        schedule = decode_schedule(item.payload)
        nowhere = np.isin(schedule.rows["topic"], [0, *self.topics.gone])
        taken = self.intake.taken(item, schedule, nowhere)
        new = schedule.rows[taken]
        if not len(new):
            return []
        first, self.next_seq = self.next_seq, self.next_seq + len(new)
        seqs = np.arange(first, self.next_seq)
        ended = Ended()
        if new["key_size"].any():
            modes = np.repeat(schedule.parts["on_conflict"], schedule.parts["rows"])[taken]
            timers = self._decided(item, new, seqs, modes, ended)
            new, seqs = new[timers], seqs[timers]
        scheduled = self._scheduled(item, new["topic"], seqs, new["due_ms"])
        return [scheduled, *_told(item, ended)]

    def _decided(
        self, item: Entry, new: RowArray, seqs: I64, modes: U32, ended: Ended
    ) -> npt.NDArray[np.bool_]:
        """Return which rows may become timers; those without a key do."""
        timers = np.ones(len(new), np.bool_)
        keyed = np.flatnonzero(new["key_size"])
        column = gather(new[keyed], {0: item.payload}, "key")
        keys = hashed(new["topic"][keyed], column).tolist()
        for at, key in zip(keyed.tolist(), keys, strict=True):
            row = new[at]
            due_ms, topic, size = map(int, (row["due_ms"], row["topic"], row["payload_size"]))
            timer = self._timer((due_ms, int(seqs[at])), topic, size)
            timers[at] = self.holders.scheduled(key, timer, int(modes[at]), ended)
        return timers

    def _timer(self, timer: tuple[int, int], topic: int, size: int) -> KeyHolder:
        return KeyHolder(
            *timer, topic, size, sure=True, place_ms=self.holders.place_ms(topic, timer[0])
        )

    def _scheduled(self, item: Entry, topics: U32, seqs: I64, due_ms: I64) -> EventColumns:
        used = np.unique(topics).tolist()
        names = np.full(max(used, default=0) + 1, "", object)
        names[used] = [self.topics.names.get(topic, "") for topic in used]
        columns = {"seq": seqs, "due_ms": due_ms, "topic": names[topics], "topic_id": topics}
        return EventColumns(EventKind.SCHEDULED, len(seqs), columns | _at(item))

    def _op(self, item: Entry, op: AnyOp) -> list[EventColumns]:
        if not isinstance(op, Move):
            return self.topics.op(item, op)
        # Messages that become new ones elsewhere, unless they were acked meanwhile, or their group
        # was deleted: that only the group knows, so both outcomes are excused.
        first, self.next_seq = self.next_seq, self.next_seq + len(op.offsets)
        if op.topic not in self.topics.names:
            return []
        due_ms = decode_schedule(memoryview(op.rows)).rows["due_ms"]
        seqs = np.arange(first, self.next_seq)
        to, made = self.topics.make(item, op.to, self.read_ms)
        made += self.topics.group_made(item, to, op.to_group)
        scheduled = self._scheduled(item, np.full(len(seqs), to, np.uint32), seqs, due_ms)
        raced = Ended(raced=[*zip(due_ms.tolist(), seqs.tolist(), strict=True)])
        return [*made, scheduled, *_told(item, raced)]

    def _cancel(self, item: Entry) -> list[EventColumns]:
        targets = payloads.decode_cancel(item.payload)
        ended = Ended()
        if not isinstance(targets, payloads.Ids):
            keys = hashed(targets.topic, targets.key).tolist()
            for topic, key in zip(targets.topic.tolist(), keys, strict=True):
                if topic not in self.topics.gone:
                    self.holders.cancelled(key, ended)
            return _told(item, ended)
        for due_ms, seq in zip(targets.due_ms.tolist(), targets.seq.tolist(), strict=True):
            if due_ms > self.read_ms or self.holders.waits(due_ms, seq):
                self.holders.gone(due_ms, seq)
                ended.cancelled.append((due_ms, seq))
            else:
                ended.raced.append((due_ms, seq))
        return _told(item, ended)

    def _reschedule(self, item: Entry) -> list[EventColumns]:
        order = payloads.decode_reschedule(item.payload)
        targets = order.targets
        count = len(targets)
        first, self.next_seq = self.next_seq, self.next_seq + count
        olds: list[tuple[int, int] | None] = [None] * count
        keys: list[int | None]
        if isinstance(targets, payloads.Ids):
            olds = [*zip(targets.due_ms.tolist(), targets.seq.tolist(), strict=True)]
            nowhere = [False] * count
            keys = [self.holders.key_of(seq) for seq in targets.seq.tolist()]
        else:
            keys = [*hashed(targets.topic, targets.key).tolist()]
            nowhere = np.isin(targets.topic, [*self.topics.gone]).tolist()
        ended, moved = Ended(), list[KeyHolder]()
        by_key = not isinstance(targets, payloads.Ids)
        for at, (key, new_due_ms) in enumerate(zip(keys, order.due_ms.tolist(), strict=True)):
            if not (nowhere[at] or (by_key and key in keys[:at])):  # a key counts once
                self._move(key, olds[at], (new_due_ms, first + at), moved, ended)
        topics = np.array([timer.topic for timer in moved], np.uint32)
        due_ms, seqs = (
            np.array([timer[column] for timer in moved], np.int64) for column in range(2)
        )
        return [self._scheduled(item, topics, seqs, due_ms), *_told(item, ended)]

    def _move(
        self,
        key: int | None,
        old: tuple[int, int] | None,
        new: tuple[int, int],
        moved: list[KeyHolder],
        ended: Ended,
    ) -> None:
        """One target of a reschedule goes on as `new`; `moved` are those before it.

        It was named by its id, `old`, or by its key. All of them: (due_ms, seq).
        """
        holders = self.holders
        if key is None:  # no key, or ended
            assert old is not None
            ended.raced += [old, new]
            moved.append(KeyHolder(*new, topic=0, size=0, sure=False))
            return
        holder = holders.holder(key)
        if holders.is_sure(key) and (holder is None or old not in (None, holder[:2])):
            return  # nobody has it, or it ended
        topic, size = (holder.topic, holder.size) if holder is not None else (0, 0)
        timer = self._timer(new, topic, size)
        before = sum(each.size for each in moved)
        fits = not moved or (all(each.sure for each in moved) and before + size <= MOVED_BYTES_MAX)
        sure = fits and holders.is_sure(key)
        holders.moved(key, timer, sure=sure, ended=ended)
        moved.append(timer._replace(sure=sure))

    def clock(self) -> EventColumns:
        """Return the CLOCK event of now."""
        columns = {
            "seq": self.next_seq - 1,
            "at_ms": self.time_ms,
            "index": self.index,
            "epoch": self.epoch,
            "read_ms": self.read_ms,
            "since_ms": self.since_ms,
            "first_seq": self.first_seq,
        }
        return EventColumns(EventKind.CLOCK, 1, columns)


def _told(item: Entry, ended: Ended) -> list[EventColumns]:
    """Return the events of timers that ended, or may have."""
    found = []
    for kind, timers in ((EventKind.CANCELLED, ended.cancelled), (EventKind.RACED, ended.raced)):
        due_ms, seq = np.array(timers, np.int64).reshape(-1, 2).T
        found.append(EventColumns(kind, len(seq), {"seq": seq, "due_ms": due_ms} | _at(item)))
    return found


def _at(item: Entry) -> dict[str, Any]:
    return {"at_ms": item.time_ms, "index": item.index, "epoch": item.epoch}


class Exporter:
    """Follows logs and writes their events; `step` is one look."""

    def __init__(
        self, follower: Follower, story: ExportStory, into: Path, *, keep_s: float
    ) -> None:
        self._follower = follower
        self._story = story
        self._outbox = Outbox(into, keep_s=keep_s)
        self._state = into / STATE_NAME
        names = self._outbox.names(PREFIX)
        self._waiting: list[EventColumns] = []
        if not names:
            self._waiting += [
                EventColumns(EventKind(kind), 1, columns) for kind, columns in story.begins
            ]
        self._told = int(names[-1].split("-")[2], 16) if names else story.index
        """The last entry that a file tells of."""
        self._first = self._told + 1
        self._beats = int(names[-1].split("-")[3], 16) if names else 0
        self._flushed_s = self._saved_s = self._pruned_s = float("-inf")
        self._saving_s = 0.0

    def step(self, now_s: float) -> bool:
        """Look once; write a file if it is time to. Return whether there was anything new.

        Raises:
            LogGone: the log was dropped before it was exported.
        """
        entries, divergences = self._follower.poll()
        for item in entries:
            told = self._story.apply(item)
            if item.index > self._told:
                self._waiting += told
        self._waiting += [self._diverged(each) for each in divergences]
        new = self._story.index >= self._first or bool(divergences)
        since_s = now_s - self._flushed_s
        if since_s >= HEARTBEAT_S or (new and since_s >= FLUSH_S):
            self.flush(now_s)
        return bool(entries)

    def _diverged(self, found: Divergence) -> EventColumns:
        columns = {"node": found.node, "detail": found.detail, "index": found.index}
        return EventColumns(EventKind.DIVERGED, 1, columns | {"at_ms": self._story.time_ms})

    def flush(self, now_s: float) -> None:
        """Write what waits, with the clock; from time to time the state, and remove old files."""
        story, self._flushed_s = self._story, now_s
        if story.index < self._told:
            return  # read again after a restart: nothing of it is new
        # The clock alone, while nothing happens, is a file too: `beats` tells them apart.
        self._beats = 0 if story.index > self._told else self._beats + 1
        name = f"{PREFIX}{self._first:016x}-{story.index:016x}-{self._beats:016x}"
        self._outbox.put(name, [*self._waiting, story.clock()])
        self._waiting.clear()
        story.begins.clear()
        self._told = story.index
        self._first = story.index + 1
        if now_s - self._saved_s >= max(STATE_S, SAVING_MAX * self._saving_s):
            self._saved_s = now_s
            began_s = time.perf_counter()
            exported_events.write_whole(self._state, story.dumps())
            self._saving_s = time.perf_counter() - began_s
        if now_s - self._pruned_s >= PRUNE_S:
            self._pruned_s = now_s
            self._outbox.prune(PREFIX, time.time())


def open_exporter(
    data: dict[str, Path], into: Path, *, status: str = "", keep_s: float = exported_events.KEEP_S
) -> Exporter:
    """Return an exporter that goes on where the last one stopped.

    A new one begins with the log, if all of it is there; else at the newest manifest of `data`.

    Raises:
        StorageError: a manifest is damaged.
        ValueError: the export goes on from files without their state.
    """
    state = into / STATE_NAME
    if state.exists():
        story = ExportStory.loads(state.read_text())
    elif into.exists() and [*into.glob(f"{PREFIX}*.parquet")]:
        raise ValueError(f"{into} holds an export without {STATE_NAME}: name another folder")
    elif all((folder / "log" / f"{1:016x}.log").exists() for folder in data.values()):
        story = ExportStory()
    else:
        stories = [
            ExportStory.at_manifest(folder / "state", RealDisk()) for folder in data.values()
        ]
        story = max(stories, key=lambda each: each.index)
    into.mkdir(parents=True, exist_ok=True)
    if not state.exists():
        exported_events.write_whole(state, story.dumps())
    logs = {name: folder / "log" for name, folder in data.items()}
    applied = None
    if status:

        def applied() -> LogIndex:
            return applied_index(status)

    follower = Follower(logs, LogIndex(story.index + 1), applied=applied)
    return Exporter(follower, story, into, keep_s=keep_s)


def applied_index(address: str) -> LogIndex:
    """Return what a node says that it has applied; 0 while it does not answer."""
    connection = http.client.HTTPConnection(address, timeout=STATUS_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/status")
        node = json.loads(connection.getresponse().read())["nodes"][0]
        return LogIndex(int(node["applied_index"]))
    except (OSError, http.client.HTTPException, ValueError, LookupError):
        return LogIndex(0)
    finally:
        connection.close()


def data_of(words: Sequence[str]) -> dict[str, Path]:
    """Return node -> data directory, of words NODE=DIR.

    Raises:
        ValueError: a word is none, or names what another does.
        NotADirectoryError: there is no such directory.
    """
    data: dict[str, Path] = {}
    for word in words:
        node, _, folder = word.partition("=")
        if not node or not folder:
            raise ValueError(f"--data {word}: must be NODE=DIR")
        if node in data or Path(folder).resolve() in map(Path.resolve, data.values()):
            raise ValueError(f"--data {word}: each must name another node and another directory")
        data[node] = Path(folder)
    for path in data.values():
        if not path.is_dir():
            raise NotADirectoryError(f"--data {path}: no such directory")
    return data


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.live.export`."""
    parser = argparse.ArgumentParser(description="export a running cluster's log as events")
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a local cluster")
    parser.add_argument(
        "--data", nargs="+", metavar="NODE=DIR", default=[],
        help="data directories: of all voters, or of one with --status",
    )  # fmt: skip
    parser.add_argument("--status", default="", metavar="HOST:PORT", help="that node's HTTP port")
    parser.add_argument("--into", type=Path, required=True, help="the folder for the events")
    parser.add_argument(
        "--keep-s", type=float, default=exported_events.KEEP_S, help="until files go"
    )
    args = parser.parse_args(argv)
    if bool(args.run) == bool(args.data):
        parser.error("name a local cluster's folder, or --data, and not both")
    if bool(args.status) != (len(args.data) == 1):
        parser.error("--data: those of all voters; or one, with that node's --status")
    if not args.keep_s > 0:
        parser.error(f"--keep-s {args.keep_s:g}: must be above 0")
    try:
        data = data_of(args.data) if args.data else RunFolder(args.run).data()
        exporter = open_exporter(data, args.into, status=args.status, keep_s=args.keep_s)
        _run(exporter)
    except (LogGone, StorageError, ValueError, OSError) as broken:
        print(f"export: {broken}", file=sys.stderr)
        return 2
    return 0


def _run(exporter: Exporter) -> None:
    stopped: list[Any] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(1))
    while not stopped:
        if not exporter.step(time.monotonic()):
            time.sleep(FLUSH_S / 10)
    exporter.flush(time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
