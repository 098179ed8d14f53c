"""The replay's tables, as Parquet files for Spark. `STORY` describes them and has their columns.

Unknown and inapplicable values are null. `topic` is the text of LogStory.life: a topic with the
name of a deleted one is another topic. The same holds for `group`, by LogStory.life_of, after a
seek or a deletion.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from chaos.oracle.group_story import GroupStory
from chaos.oracle.pending_rows import I64, Rows
from chaos.oracle.story import ENDS, FIRED, HELD, PENDING, LogStory, StoryBook
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.policies import decode_policy
from timerspark.log.segment_files import Piece, entries_of

_TEXTS: Final = {
    *("topic", "group", "end", "why", "type", "quota", "fields", "key", "op", "leader"),
    *("from_topic", "from_group"),
}
_FLAGS: Final = {"redriven", "sought", "over", "deleted", "untrue", "last"}
_LISTS: Final = {"voters"}


def _schema(names: str) -> pa.Schema:
    """Return a schema: integers, except the columns of _TEXTS, _FLAGS and _LISTS."""
    kinds = ((_TEXTS, pa.string()), (_FLAGS, pa.bool_()), (_LISTS, pa.list_(pa.string())))
    types = {name: kind for of, kind in kinds for name in of}
    return pa.schema([(name, types.get(name, pa.int64())) for name in names.split()])


_SLOT: Final = "topic group queue_offset "
_FATE: Final = (
    "seq mark due_ms schedule_index scheduled_at_ms topic end end_index end_epoch ended_at_ms"
    " queue_offset other_seq old_due_ms payload_size"
)
CARRIED: Final = _schema(f"{_FATE} from_topic from_group from_offset redriven")
ACKS: Final = _schema(_SLOT + "attempts ack_index ack_epoch acked_at_ms count")
EXPIRED: Final = _schema(_SLOT + "attempts expire_index expire_epoch expired_at_ms ttl_ms")
GROUPS: Final = _schema(
    "topic group group_id start_offset kept_offset acked sought over deleted type"
)
TTLS: Final = _schema("topic from_ms ttl_ms")
STORY: Final = {
    # A row per scheduled row of the log. `other_seq`: the timer that it replaced, moved, or left
    # alone. `old_due_ms`: of the timer that a RESCHEDULE moved.
    "fates": _schema(_FATE),
    # A row per message that a MOVE made of another one, and its origin. Not `redriven`: a letter.
    "carried": CARRIED,
    # A row per run of `count` messages of a group that one entry acked after as many attempts.
    "acks": ACKS,
    # A row per message that came back without an ack. `attempts`: of that delivery, at most. `why`:
    # `ended`: its lease; `nacked`; `recalled`: an earlier message of its key came back.
    # `not_before_ms`: of a nack, else 0.
    "returns": _schema(_SLOT + "attempts why not_before_ms return_index returned_at_ms"),
    # A row per message that a group did not ack in time. `attempts`: the highest before. `ttl_ms`:
    # by the policies of that entry; 0: none.
    "expired": EXPIRED,
    # A row per life of a group. `kept_offset`: the first that the topic retained then. `sought`:
    # one of several lives, or one that ended before its topic. `over`: it or its topic was deleted,
    # or it was sought. `deleted`: the group itself was. `type`: shared, key_shared, …
    "groups": GROUPS,
    # A row per CHECKPOINT entry.
    "checkpoints": _schema("index time_ms scheduled fired"),
    # A row per deleted topic.
    "deletions": _schema("topic topic_id delete_index"),
    # A row per SCHEDULE entry and quota of a topic of it. `ready`: see policy_story.py.
    "quotas": _schema("topic schedule_index quota most ready"),
    # A row per topic whose policies ever moved due times back, by `by_ms` at most.
    "postponed": _schema("topic by_ms"),
    # A row per time to live of a topic, in order. 0: none. Topics that never had one are left out.
    "ttls": TTLS,
    # A row per change of a topic's rates of delivery, likewise.
    "rates": _schema("topic from_ms topic_rate group_rate"),
    # A row per timer of a series. `since_ms`: when the series began to wait; null: a reschedule
    # made the timer. `untrue`: `planned_ms` contradicts the definition. seq = 0: the series waits
    # at the log's end, or ended too early.
    "occurrences": _schema("topic key series number seq planned_ms since_ms at_ms untrue"),
    # A row per SERIES entry with an effect. `fields`: JSON.
    "series": _schema("topic key op fields series_index"),
    # A row per pause of a topic. `until_ms`: beyond all times if it continues.
    "pauses": _schema("topic from_ms until_ms"),
    # A row per POLICY entry. `topic`: a namespace's is NAME/, the cluster's /. `fields`: a JSON
    # object of all fields of the scope from then on.
    "policies": _schema("topic policy_index fields"),
    # A row per CREATE and ALTER of a group. Not `last`: another ALTER followed.
    "settings": _schema("topic group lease_ms max_attempts max_in_flight last"),
    # A row per dead letter with fewer failures than its group allows.
    "moved_early": _schema(_SLOT + "failures move_index"),
    # A row per EPOCH entry. `epoch`: of its frame. `leader` and `voters`: 16 hexadecimal digits.
    "leaders": _schema("epoch_index epoch said_epoch leader voters"),
    # A row per scheduled row, if the replay was told to. `logged`: the CRC-32 of its payload.
    "payloads": _schema("mark logged"),
}
_FIGURES: Final = ("last_index", "last_read_time_ms", "scheduled", *ENDS)
FIGURES: Final = ", ".join(f"{name} BIGINT" for name in _FIGURES)

_ROWS_PER_GROUP: Final = 1 << 19
_ENDS: Final = pa.array(ENDS)


class GrowingTable:
    """A Parquet file that grows by pieces. A row group is written when enough rows wait."""

    def __init__(self, writer: pq.ParquetWriter, columns_of: Callable[..., Iterable[Any]]) -> None:
        """`columns_of`: makes the columns of a row group from those of the pieces."""
        self._writer, self._columns_of = writer, columns_of
        self._waiting: list[tuple[Any, ...]] = []
        self._rows = 0

    def add(self, rows: int, *columns: Any) -> None:
        """Add a piece of `rows` rows: arrays, tuples, or single values for all rows."""
        if rows:
            full = (c if isinstance(c, tuple) else np.broadcast_to(c, rows) for c in columns)
            self._waiting.append((*full,))
            self._rows += rows
        if self._rows >= _ROWS_PER_GROUP:
            self.write()

    def write(self) -> None:
        """Write the waiting rows."""
        if self._waiting:
            columns = self._columns_of(*map(_joined, zip(*self._waiting, strict=True)))
            self._writer.write_table(pa.table([*columns], schema=self._writer.schema))
        self._waiting, self._rows = [], 0


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return [*itertools.chain.from_iterable(parts)]
    return np.concatenate(parts)


class ParquetBook(StoryBook):
    """The tables of a story, written to a folder."""

    story: LogStory
    """The story whose topics and epochs name the rows; set before the first row."""

    def __init__(self, folder: Path, files: contextlib.ExitStack) -> None:
        """`files` closes the files of the tables."""
        self.counts = np.zeros(len(ENDS), np.int64)
        """Timers by their end."""
        columns_of: dict[str, Callable[..., Iterable[Any]]] = {
            "fates": self._fates,
            "carried": self._carried,
            "acks": self._runs,
            "returns": self._slots,
            "expired": self._slots,
        }
        self._tables = {}
        for name, schema in STORY.items():
            path = folder / name / "part-0.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = files.enter_context(pq.ParquetWriter(path, schema, compression="lz4"))
            self._tables[name] = GrowingTable(writer, columns_of.get(name, lambda *each: each))

    def fates(self, rows: Rows, **columns: I64 | int) -> None:
        """Add timers that ended."""
        names = ("end_index", "ended_at_ms", "queue_offset")
        end = np.broadcast_to(columns["end"], len(rows))
        self.counts += np.bincount(end, minlength=len(ENDS))
        self._tables["fates"].add(len(rows), rows, end, *(columns[name] for name in names))

    def carried(self, group: GroupStory, rows: Rows, offsets: I64, **columns: I64 | int) -> None:
        """Add messages that a MOVE carried."""
        more = offsets, columns["queue_offset"], columns["redriven"]
        self._tables["carried"].add(len(rows), group.group_id, rows, *more)

    def payloads(self, marks: I64, crcs: I64) -> None:
        """Add checksums of payloads."""
        self._tables["payloads"].add(len(marks), marks, crcs)

    def messages(self, table: str, group: GroupStory, rows: Any) -> None:
        """Add messages of a group to a table."""
        self._tables[table].add(len(rows), group.group_id, rows)

    # ---- columns

    def _fates(
        self, rows: Rows, end: I64, end_index: I64, ended_at_ms: I64, offsets: I64
    ) -> list[pa.Array]:
        starts = np.array(self.story.epoch_starts or [(0, 0)], np.int64)
        end_epoch = starts[np.searchsorted(starts[:, 0], end_index, "right") - 1, 1]
        top = max([*self.story.topics, int(rows["topic"].max())])
        topics = pa.array([self._topic(topic) for topic in range(top + 1)], pa.string())
        ended, fired = pa.array((end != PENDING) & (end != HELD)), pa.array(end == FIRED)
        return [
            *(
                pa.array(np.ascontiguousarray(rows[name]))
                for name in ("seq", "mark", "due_ms", "index", "time_ms")
            ),
            topics.take(pa.array(rows["topic"].astype(np.int64))),
            _ENDS.take(pa.array(end)),
            pc.if_else(ended, pa.array(end_index), None),
            pc.if_else(ended, pa.array(end_epoch), None),
            pc.if_else(ended, pa.array(ended_at_ms), None),
            pc.if_else(fired, pa.array(offsets), None),
            *(_positive(rows[name]) for name in ("other", "old_due_ms")),
            pa.array(rows["payload_size"].astype(np.int64)),
        ]

    def _carried(
        self, groups: I64, rows: Rows, from_offset: I64, offsets: I64, redriven: I64
    ) -> list[pa.Array]:
        index, at_ms = (np.ascontiguousarray(rows[name]) for name in ("index", "time_ms"))
        return [
            *self._fates(rows, np.full(len(rows), FIRED), index, at_ms, offsets),
            *self._groups(groups),
            *map(pa.array, (from_offset, redriven)),
        ]

    def _slots(self, groups: I64, rows: Any) -> list[pa.Array]:
        columns = [pa.array(np.ascontiguousarray(rows[name])) for name in rows.dtype.names]
        return [*self._groups(groups), *columns]

    def _runs(self, groups: I64, acks: Any) -> list[pa.Array]:
        """Return the columns of acks: a row per run."""
        same = (groups[1:] == groups[:-1]) & (np.diff(acks["queue_offset"]) == 1)
        for name in ("attempts", "index"):
            same &= acks[name][1:] == acks[name][:-1]
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        columns = self._slots(groups[starts], acks[starts])
        return [*columns, pa.array(np.diff(starts, append=len(acks)))]

    def _groups(self, numbers: I64) -> list[pa.Array]:
        """Return the topics and the names of groups, by their ids."""
        known = [self.story.groups[number] for number in sorted(self.story.groups)]
        topics = [None, *(self._topic(group.topic) for group in known)]
        names = [None, *map(self.story.life_of, known)]
        return [pa.array(each, pa.string()).take(pa.array(numbers)) for each in (topics, names)]

    def _topic(self, number: int) -> str | None:
        return self.story.life(number) if number in self.story.topics else None

    def finish(self) -> None:
        """Write the waiting rows, the groups and the topics."""
        for name, rows in _tables(self.story).items():
            self._tables[name].add(len(rows), *zip(*rows, strict=True))
        for table in self._tables.values():
            table.write()


def _positive(column: I64) -> pa.Array:
    return pa.array(np.ascontiguousarray(column), mask=column <= 0)


def _tables(story: LogStory) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of tables that are known at the end: groups, deletions, quotas, …"""

    def named(group: GroupStory) -> tuple[str, str]:
        return story.life(group.topic), story.life_of(group)

    groups = [
        (
            *named(group), group.group_id, group.start, group.oldest,
            group.acked_count,
            group.later_life or (group.over and group.topic not in story.deleted),
            group.over, group.deleted, group.type,
        )
        for group in story.groups.values()
    ]  # fmt: skip
    return {
        "groups": groups,
        "checkpoints": story.checkpoints,
        "deletions": [(story.life(t), t, index) for t, (index, _) in story.deleted.items()],
        "quotas": [(story.life(topic), *rest) for topic, *rest in story.quotas.in_force],
        "postponed": [(story.life(t), by_ms) for t, by_ms in story.postponed.items() if by_ms],
        **{
            name: [
                (story.life(topic), *each)
                for topic, spans in known.items()
                for each in spans
                if any(any(values) for _, *values in spans)
            ]
            for name, known in (("ttls", story.ttls), ("rates", story.rates))
        },
        "occurrences": [(story.life(each.topic), *each[1:]) for each in story.series.rows],
        "series": [
            (story.life(each.topic), each.key, each.op, json.dumps(each.fields), each.series_index)
            for each in story.series.changes
        ],
        "pauses": [
            (story.life(topic), *span) for topic, spans in story.pauses.items() for span in spans
        ],
        "policies": [
            (story.life(scope.topic) if scope.topic else f"{scope.namespace}/", index, fields)
            for scope, index, fields in story.policies
        ],
        "settings": [
            (*named(group), s.lease_ms, s.max_attempts, s.max_in_flight, s is group.settings[-1])
            for group in story.groups.values()
            for s in group.settings
        ],
        "moved_early": [(*named(group), *rest) for group, *rest in story.moved_early],
        "leaders": [
            (index, epoch, said.epoch, f"{said.leader:016x}", [f"{v:016x}" for v in said.voters])
            for (index, epoch), said in zip(story.epoch_starts, story.leaders, strict=True)
        ],
    }


def replay(
    pieces: Sequence[Piece], into: Path, spill: Path, *, checksums: bool = False
) -> dict[str, int]:
    """Replay consecutive pieces of logs into tables in a folder; return a row of `FIGURES`.

    Raises:
        CorruptFileError: a log is damaged.
        ValueError: an entry can't be replayed.
    """
    assert pieces[0].first == 1, pieces[0]
    with contextlib.ExitStack() as files:
        book = ParquetBook(into, files)
        story = book.story = LogStory(book, spill, checksums=checksums)
        for item in itertools.chain.from_iterable(map(entries_of, pieces)):
            try:
                _check_policy(item)
                story.apply(item)
            except ValueError as error:
                text = f"entry {item.index} ({item.kind.name}) can't be replayed: {error}"
                raise ValueError(text) from error
        story.end()
        book.finish()
    return {
        "last_index": story.last_index,
        "last_read_time_ms": story.last_read_time_ms,
        "scheduled": story.timers,
        **dict(zip(ENDS, book.counts.tolist(), strict=True)),
    }


def _check_policy(item: Entry) -> None:
    """Check that no timer becomes due before its requested time: it would seem to fire early.

    Raises:
        ValueError: the policy has a delay below 0.
    """
    if item.kind is not EntryKind.POLICY:
        return
    _, policy = decode_policy(item.payload)
    for name in ("delayed_delivery", "fixed_delay_ms"):
        value = getattr(policy, name)
        if value is not None and value is not True:
            raise ValueError(f"the audit does not know {name} = {value}")
