"""What the judge knows of whole topics: pauses, deletion, time to live, since when they are read.

    PAUSED ---- held: nothing is judged as lost ---- RESUMED ---- may take RELEASE_MS ---- as ever
      nothing fires                                    drop      nothing of what was overdue fires
                                                       latest    at most one of it does

Of what was overdue at a resume by `drop` or `latest` nothing is missed; and so nothing is of what
may have expired by an entry that says that something has, or of a deleted topic. What fires or is
handed out all the same is told by its times on the cluster's clock: when it fired is the time of
its entry, and when it was handed out, the leader's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chaos.live.exported_events import RELEASE_MS, Columns, EventKind

NEVER: Final = 1 << 62
PAUSES_MAX: Final = 64
"""Of one topic that are remembered."""

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.void]


@dataclass(slots=True)
class TopicPause:
    """One pause of a topic; times of the log."""

    paused_ms: int
    resumed_ms: int = NEVER
    catch_up: str = ""
    until_ms: int = 0
    """What was due by then, and has a seq up to `last_seq`, was overdue at the resume."""
    last_seq: int = 0
    one: int = 0
    """Seq of the one that fired, of what was overdue at a resume by `latest`."""

    def overdue(self, rows: Rows) -> Mask:
        """Return which rows of its topic were overdue as it ended, had they been held."""
        mine: Mask = (rows["due_ms"] <= self.until_ms) & (rows["seq"] <= self.last_seq)
        return mine


@dataclass(slots=True)
class Standing:
    """One topic."""

    witnessed_ms: int = 0
    """Since when the witness's group is there, for what is made while it is exported."""
    deleted_ms: int = NEVER
    ttl_ms: int = 0
    ttl_since_ms: int = 0
    expired_ms: int = 0
    """What was due by then may have expired."""
    release_ms: int = 0
    """When all that was held has left."""
    pauses: list[TopicPause] = field(default_factory=list)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Standing":
        """Return what `asdict` has made."""
        return cls(**fields | {"pauses": [TopicPause(**each) for each in fields["pauses"]]})

    @property
    def paused(self) -> bool:
        """Whether it is."""
        return bool(self.pauses) and self.pauses[-1].resumed_ms == NEVER

    @property
    def resumed_ms(self) -> int:
        """When it went on last."""
        return self.pauses[-1].resumed_ms if self.pauses else 0

    def take(self, fact: dict[str, Any]) -> None:
        """Take in what the log says of it, in the order of the log."""
        at_ms = int(fact["at_ms"])
        match int(fact["kind"]):
            case EventKind.MADE:
                self.witnessed_ms = NEVER
            case EventKind.WITNESSED:
                self.witnessed_ms = at_ms
            case EventKind.PAUSED:
                self.pauses = [*self.pauses[1 - PAUSES_MAX :], TopicPause(at_ms)]
            case EventKind.RESUMED:
                if not self.paused:  # before the export began
                    self.pauses.append(TopicPause(at_ms))
                last = self.pauses[-1]
                last.resumed_ms, last.catch_up = at_ms, str(fact["detail"])
                last.until_ms, last.last_seq = int(fact["read_ms"]), int(fact["seq"])
                self.release_ms = at_ms + RELEASE_MS
            case EventKind.LIVES:
                self.ttl_ms, self.ttl_since_ms = int(fact["ttl_ms"]), at_ms
            case EventKind.EXPIRED:
                self.expired_ms = max(self.expired_ms, int(fact["read_ms"]))
            case kind:
                assert kind == EventKind.DELETED, kind
                self.deleted_ms = at_ms

    def forget(self, before_ms: int) -> None:
        """Forget pauses that ended before, but for the last one."""
        self.pauses = [
            pause
            for pause in self.pauses
            if pause.resumed_ms >= before_ms or pause is self.pauses[-1]
        ]

    def new_epoch(self, since_ms: int) -> None:
        """A leader begins anew: what was under way goes on from then."""
        if self.release_ms > since_ms:
            self.release_ms = max(self.release_ms, since_ms + RELEASE_MS)

    # ---- of rows of this topic, all of which are in the log

    def excuses(self, rows: Rows) -> Mask:
        """Return of which rows nothing is to come, or may be nothing."""
        found: Mask = (rows["due_ms"] <= self.expired_ms) | (self.deleted_ms < NEVER)
        for pause in self.pauses:
            if pause.catch_up in ("drop", "latest"):
                found |= pause.overdue(rows)
        return found

    @property
    def forbids(self) -> bool:
        """Whether there is anything that was not to fire, or to be handed out, or not to come."""
        return bool(self.pauses or self.ttl_ms or self.expired_ms) or self.deleted_ms < NEVER

    def fired_wrongly(self, rows: Rows, clock_ms: int) -> Iterator[tuple[str, Mask, str]]:
        """Yield (kind, which, why) of rows, which were given, that were not to fire when they did.

        Only of what fired before `clock_ms`, the log's clock: a resume may come with it. What came
        from another topic, a dead letter, is none of them.
        """
        known = rows["fired_at_ms"] < clock_ms
        fired_ms = rows["fired_at_ms"]
        nexts = [*(pause.paused_ms for pause in self.pauses[1:]), NEVER]
        for pause, paused_ms in zip(self.pauses, nexts, strict=False):
            held = known & (fired_ms > pause.paused_ms) & (fired_ms < pause.resumed_ms)
            yield "held", held, "fired while its topic was paused"
            if pause.catch_up in ("drop", "latest"):
                after = (fired_ms > pause.resumed_ms) & (fired_ms <= paused_ms)
                dropped = known & after & pause.overdue(rows)
                if pause.catch_up == "latest" and dropped.any():
                    pause.one = pause.one or int(rows["seq"][dropped][0])
                    dropped &= rows["seq"] != pause.one
                yield "dropped", dropped, f"fired, though overdue at a resume by {pause.catch_up}"

    def given_wrongly(
        self, rows: Rows, clock_ms: int, slack_ms: int
    ) -> Iterator[tuple[str, Mask, str]]:
        """Yield (kind, which, why) of rows, which were given, that were not to be handed out.

        A deposed leader may do so for `slack_ms`. Only of what was handed out before `clock_ms`,
        the log's clock: its time to live may have changed.
        """
        handed_out_ms = rows["ended_ms"]
        if self.deleted_ms < NEVER:
            late = (rows["fired_at_ms"] > self.deleted_ms) | (
                handed_out_ms > self.deleted_ms + slack_ms
            )
            yield "deleted", late, "fired, or handed out, after its topic was deleted"
        if self.ttl_ms:
            late = (handed_out_ms >= rows["due_ms"] + self.ttl_ms) & (handed_out_ms < clock_ms)
            late &= handed_out_ms > self.ttl_since_ms + slack_ms
            yield "expired", late, f"handed out after its time to live of {self.ttl_ms} ms"


@dataclass(slots=True)
class Standings:
    """All topics of which something is known."""

    of: dict[int, Standing] = field(default_factory=dict)

    @classmethod
    def loads(cls, fields: Sequence[tuple[int, dict[str, Any]]]) -> "Standings":
        """Return what `dumps` has made, perhaps read from JSON."""
        return cls({topic: Standing.of(each) for topic, each in fields})

    def dumps(self) -> list[tuple[int, dict[str, Any]]]:
        """Return it for JSON."""
        return [(topic, asdict(each)) for topic, each in self.of.items()]

    def take(self, facts: Columns) -> bool:
        """Take in what the log says; return whether what is due has to be looked at again."""
        moved = False
        names = ("kind", "topic_id", "at_ms", "read_ms", "seq", "ttl_ms", "detail")
        for at in np.lexsort((facts["kind"], facts["index"])).tolist():
            fact = {name: facts[name][at] for name in names}
            self.of.setdefault(int(fact["topic_id"]), Standing()).take(fact)
            moved |= int(fact["kind"]) in (EventKind.PAUSED, EventKind.RESUMED, EventKind.DELETED)
        return moved

    def forget(self, before_ms: int) -> None:
        """Forget pauses that ended before."""
        for standing in self.of.values():
            if len(standing.pauses) > 1:
                standing.forget(before_ms)

    def new_epoch(self, since_ms: int) -> None:
        """A leader begins anew."""
        for standing in self.of.values():
            standing.new_epoch(since_ms)
