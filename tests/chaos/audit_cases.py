"""Cases of the audit's rules, each in a topic of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from chaos.audit.rules.queries import BOUNDS
from chaos.history import history
from tests.chaos.world import SALT, id_of
from timer.model import timer_id

DUE_MS = 1_000_000


UNTIL_MS = 2_000_000


ERROR_MS = 1_000
"""How far the clocks differ at most."""


POSTPONED_MS = 200
"""By how much a policy makes timers due later, in the last case."""


APART = 10_000  # between the marks, seqs and offsets of one case and the next


FATE = (
    "seq BIGINT, mark BIGINT, due_ms BIGINT, schedule_index BIGINT, scheduled_at_ms BIGINT,"
    " topic STRING, end STRING, end_index BIGINT, end_epoch BIGINT, ended_at_ms BIGINT,"
    " queue_offset BIGINT, other_seq BIGINT, old_due_ms BIGINT, payload_size BIGINT,"
    " disagree BOOLEAN"
)


class Planted:
    """One timer per mark, all honest: asked, fired at its due time, given once, acked."""

    def __init__(self, marks: Sequence[int]) -> None:
        self.lines: list[dict[str, Any]] = [
            {"op": "open", "client": "c", "topic": "t", "group": "g", "start_ms": 0}
        ]
        self.fates: list[dict[str, Any]] = []
        self.acks: list[dict[str, Any]] = []
        self.expired: list[dict[str, Any]] = []
        self.doubled: list[int] = []
        for mark in marks:
            self.ask(mark)
            self.fate(mark)
            self.give(mark)
            self.ack(mark)

    def ask(self, mark: int, outcome: str = "ok") -> None:
        ids = [id_of(DUE_MS + mark, mark)] if outcome == "ok" else None
        self.lines.append(
            {"op": "schedule", "outcome": outcome, "topic": "t", "start_ms": 1, "end_ms": 2}
            | {"marks": [mark], "ids": ids, "due_ms": [DUE_MS + mark], "client": "c"}
        )

    def delay(self, mark: int, delay_ms: int) -> None:
        """Let it be asked for by its delay, of which 1 to 2 ms pass until it is answered."""
        for line in self.lines:
            if line.get("marks") == [mark] and line["op"] == "schedule":
                line |= {"due_ms": None, "delay_ms": delay_ms}

    def fate(self, mark: int, **other: Any) -> None:
        fired = {"end": "fired", "end_index": 9, "end_epoch": 1, "ended_at_ms": DUE_MS + mark}
        row = {"seq": mark, "topic": "t", "due_ms": DUE_MS + mark, "mark": mark, "disagree": False}
        row |= {"schedule_index": 1, "scheduled_at_ms": 2, "queue_offset": mark} | fired
        row |= {"other_seq": None, "old_due_ms": None}
        self.fates.append(row | other)

    def give(self, mark: int, **other: Any) -> None:
        self.lines.append(
            {"op": "deliver", "client": "c", "topic": "t", "group": "g", "epoch": 1, "lease_id": 1}
            | {"offsets": [mark], "ids": [id_of(DUE_MS + mark, mark)], "marks": [mark]}
            | {"attempts": [1], "fired_at_ms": [DUE_MS + mark], "due_ms": [DUE_MS + mark]}
            | {"received_ms": DUE_MS + mark + 10}
            | other
        )

    def ack(self, mark: int) -> None:
        self.lines.append(
            {"op": "ack", "client": "c", "topic": "t", "group": "g", "outcome": "ok", "epoch": 1}
            | {"offsets": [mark], "results": ["ACKED"], "start_ms": 3, "end_ms": DUE_MS + mark + 20}
        )
        slot = {"topic": "t", "group": "g", "queue_offset": mark}
        self.acks.append(slot | {"ack_epoch": 1, "attempts": 1})

    def expire(self, mark: int, after_ms: int = 50) -> None:
        """Let it expire in the group, which never acks it; given out once at most until then."""
        self.drop(mark, "ack")
        row = {"topic": "t", "group": "g", "queue_offset": mark, "expire_epoch": 1, "attempts": 1}
        self.expired.append(row | {"expired_at_ms": DUE_MS + mark + after_ms, "ttl_ms": 50})

    def say(self, mark: int, result: str) -> None:
        """Let the answer to its ack be another one."""
        for line in self.lines:
            if line["op"] == "ack" and line["offsets"] == [mark]:
                line["results"] = [result]

    def cancel(
        self, mark: int, result: str | None, outcome: str = "ok", at_ms: int = 4, **order: Any
    ) -> None:
        at_ms = DUE_MS + mark if result == "ALREADY_FIRED" else at_ms
        self.lines.append(
            {"op": "cancel", "client": "c", "outcome": outcome, "start_ms": 3, "end_ms": at_ms}
            | {"ids": [id_of(DUE_MS + mark, mark)], "results": result and [result]}
            | order
        )

    def asked_by(self, mark: int, client: str, request: int, index: int) -> None:
        """Let it be the timer of a client's numbered request, logged at `index`; it fires next."""
        self.change(mark, schedule_index=index, end_index=index + 1)
        for line in self.lines:
            if line["op"] == "schedule" and line["marks"] == [mark]:
                line |= {"client": client, "request": request}

    def drop(self, mark: int, *ops: str, log: bool = False) -> None:
        """Take out what one timer's witnesses say."""
        self.lines = [
            line
            for line in self.lines
            if not (line["op"] in ops and mark in (line.get("marks") or line.get("offsets", [])))
        ]
        self.acks = [a for a in self.acks if not ("ack" in ops and a["queue_offset"] == mark)]
        if log:
            self.fates = [fate for fate in self.fates if fate["mark"] != mark]

    def change(self, mark: int, **other: Any) -> None:
        """Change what the log says of a timer."""
        for fate in self.fates:
            if fate["mark"] == mark:
                fate.update(other)

    def change_ack(self, mark: int, **other: Any) -> None:
        """Change what the log says of its ack."""
        self.acks = [a | other if a["queue_offset"] == mark else a for a in self.acks]

    def answer(self, mark: int, due_ms: int) -> None:
        """Make every mention of one timer's id say another due time."""
        for line in self.lines:
            if line.get("marks") == [mark]:
                line["ids"] = [id_of(due_ms, mark)]

    def cancelled(self, mark: int) -> None:
        self.drop(mark, "deliver", "ack")
        self.change(mark, end="cancelled", queue_offset=None)

    def pending(self, mark: int, due_ms: int) -> None:
        self.drop(mark, "deliver", "ack")
        nothing = dict.fromkeys(("end_index", "end_epoch", "ended_at_ms", "queue_offset"))
        self.change(mark, end="pending", due_ms=due_ms, **nothing)

    # ---- keys and reschedules; seqs of timers that reschedules made are 1000 + their marks'

    def keyed(self, mark: int, key: str, result: str = "SCHEDULED", **other: Any) -> None:
        """Let a timer be asked for with a key, and answered so; `existing` is a seq."""
        existing = other.pop("existing", None)
        modes = {"KEPT": "keep", "REJECTED": "reject", "NOT_PENDING": "update"}
        mode = modes.get(result, "replace")
        fields = {"keys": [key], "results": [result], "on_conflict": mode} | other
        if existing is not None:
            fields["existing"] = [id_of(DUE_MS + existing, existing)]
            if result in ("KEPT", "REJECTED"):
                fields["ids"] = [fields["existing"][0] if result == "KEPT" else None]
        if result == "NOT_PENDING":
            fields |= {"ids": [None], "existing": [None]}
        for line in self.lines:
            if line["op"] == "schedule" and line["marks"] == [mark]:
                line.update(fields)

    def no_timer(self, mark: int, end: str, other_seq: int, key: str) -> None:
        """Let a pending timer have its key, in the log and by the answer."""
        self.drop(mark, "deliver", "ack")
        self.change(mark, end=end, queue_offset=None, end_index=1, other_seq=other_seq)
        self.keyed(mark, key, end.upper(), existing=other_seq)

    def ended(self, mark: int, end: str, index: int = 5) -> None:
        """Let it have ended as by a change, given to nobody."""
        self.drop(mark, "deliver", "ack")
        self.change(mark, end=end, queue_offset=None, end_index=index, ended_at_ms=5)

    def moved(self, mark: int, *, told: str = "RESCHEDULED", by: str = "id") -> None:
        """Let a timer be rescheduled to half a second later, fire then, and be given."""
        self.ended(mark, "rescheduled")
        due_ms, seq = DUE_MS + mark + 500, 1000 + mark
        self.fate(mark, seq=seq, due_ms=due_ms, schedule_index=5, ended_at_ms=due_ms,
                  queue_offset=seq, other_seq=mark, old_due_ms=DUE_MS + mark)  # fmt: skip
        self.give(mark, offsets=[seq], ids=[id_of(due_ms, seq)], fired_at_ms=[due_ms])
        slot = {"topic": "t", "group": "g", "queue_offset": seq}
        self.acks.append(slot | {"ack_epoch": 1, "attempts": 1})
        self.doubled.append(mark)
        self.move(mark, told, by)

    def move(self, mark: int, told: str | None, by: str = "id", **other: Any) -> None:
        """Let a client have asked for that."""
        due_ms, ok = DUE_MS + mark + 500, told is not None
        end_ms = DUE_MS + mark if told == "ALREADY_FIRED" else 4
        line = {"op": "reschedule", "client": "c", "start_ms": 3, "end_ms": end_ms}
        line["due_ms"] = [due_ms]
        line["outcome"] = "ok" if ok else "unknown"
        new = [id_of(due_ms, 1000 + mark)] if told == "RESCHEDULED" else [None]
        answer = {"results": [told], "new_ids": new} if ok else {}
        match by:
            case "id":
                line |= {"ids": [id_of(DUE_MS + mark, mark)], **answer}
            case "filter":
                line |= {"topic": "t", "key_prefix": "k", "changed": 1 if ok else None}
            case key:
                line |= {"topic": "t", "keys": [key], **answer}
        self.lines.append(line | other)


@dataclass(frozen=True, slots=True)
class Case:
    """A planted fault, and the findings that it must have."""

    planted: Planted
    expected: dict[int, str]
    """Mark -> verdict."""
    old: dict[int, str] = field(default_factory=dict)
    """Mark -> verdict of a timer that was rescheduled, where it is not "rescheduled"."""

    def wanted(self) -> list[tuple[int, str]]:
        """Return (mark, verdict) of every timer; one that became two has two verdicts."""
        moved = {fate["mark"] for fate in self.planted.fates if fate["old_due_ms"] is not None}
        old = dict.fromkeys(moved, "rescheduled") | self.old
        twice = ((mark, old.get(mark, self.expected[mark])) for mark in self.planted.doubled)
        return sorted([*self.expected.items(), *twice])


Found = list[tuple[int | None, str, int]]
"""(mark, verdict, seq) of a case's timers."""


def told(found: Found) -> list[tuple[int, str]]:
    """Return the verdicts of the timers that have a mark."""
    return sorted((mark, each) for mark, each, _ in found if mark is not None)


def moved_by(row: dict[str, Any], topic: str, by: int) -> dict[str, Any]:
    """Return a line, fate or ack in another topic, with marks, seqs and offsets `by` higher."""

    def moved(text: str | None) -> str | None:
        if text is None:
            return None
        due_ms, seq, _ = timer_id.decode(timer_id.from_text(text), SALT)
        return id_of(int(due_ms[0]), int(seq[0]) + by)

    row = row | ({"topic": topic} if "topic" in row else {})
    for name in {"mark", "seq", "queue_offset", "other_seq"} & row.keys():
        row[name] = row[name] and row[name] + by
    for name in {"marks", "offsets"} & row.keys():
        row[name] = [each + by for each in row[name]]
    for name in {"ids", "new_ids", "existing"} & row.keys():
        row[name] = row[name] and [*map(moved, row[name])]
    return row


def told_by(spark: SparkSession, cases: Sequence[Case]) -> dict[str, DataFrame]:
    """Return what all cases hold, each in a topic of its own: lines, fates, acks and expired."""
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("lines", "fates", "acks", "expired")
    }
    for number, case in enumerate(cases):
        for name, together in rows.items():
            own = getattr(case.planted, name)
            together += [moved_by(row, f"t{number}", APART * number) for row in own]
    slot = "topic STRING, `group` STRING, queue_offset BIGINT"
    acks = spark.createDataFrame(rows["acks"], slot + ", ack_epoch BIGINT, attempts BIGINT")
    numbers = ("expire_epoch", "attempts", "expired_at_ms", "ttl_ms")
    expired = ", ".join([slot, *(f"{n} BIGINT" for n in numbers)])
    return {
        "lines": spark.createDataFrame(rows["lines"], history.SCHEMA),
        "fates": spark.createDataFrame(rows["fates"], FATE),
        "acks": acks.withColumn("count", lit(1).cast("bigint")),
        "expired": spark.createDataFrame(rows["expired"], expired),
    }


def violations() -> Case:
    """Every violation that is not about keys or changes."""
    p = Planted(range(1, 40))
    expected = dict.fromkeys(range(1, 40), "ok")
    # Lost: nowhere in the log; fired but never given; never fired; cancelled by nobody.
    p.drop(1, "deliver", "ack", log=True)
    p.drop(2, "deliver", "ack")
    p.pending(3, DUE_MS + 3)
    p.cancelled(4)
    expected |= dict.fromkeys((1, 2, 3, 4), "lost")
    # Duplicate: one ask became two timers; one timer got two queue offsets.
    p.fate(5, seq=105, queue_offset=105)
    p.doubled.append(5)
    p.give(6, offsets=[106], attempts=[2])
    expected |= dict.fromkeys((5, 6), "duplicate_fire")
    plant_early(p, expected)
    # Phantom: nobody asked; asked and refused; given, but only pending in the log.
    p.drop(9, "schedule")
    p.drop(10, "schedule")
    p.ask(10, "fail")
    p.pending(11, DUE_MS + 11)
    p.give(11)
    expected |= dict.fromkeys((9, 10, 11), "phantom")
    # Diverged: nodes disagree; what was answered, or given, is not what the log says.
    p.change(12, disagree=True)
    p.answer(13, DUE_MS + 14)
    p.drop(14, "deliver")
    p.give(14, marks=[999])
    expected |= dict.fromkeys((12, 13, 14), "diverged")
    # Given again: an attempt that the log counted after the ack; by a later epoch than the ack's;
    # unmarked, also if it is not the first; whatever the clients' clocks say.
    p.give(15, received_ms=DUE_MS, attempts=[2])
    p.give(16, received_ms=DUE_MS, attempts=[1], epoch=2)
    p.give(17)
    p.change_ack(22, attempts=2)
    p.give(22, attempts=[2])
    p.give(22, attempts=[2])
    expected |= dict.fromkeys((15, 16), "acked_again")
    expected |= dict.fromkeys((17, 22), "unmarked_redelivery")
    # Cancels: given, or fired, although CANCELLED; an answer that the log contradicts.
    p.cancel(18, "CANCELLED")
    p.change(19, end="cancelled", queue_offset=None)
    p.cancel(19, "CANCELLED")
    p.cancelled(20)
    p.cancel(20, "ALREADY_FIRED")
    p.cancel(20, None, "unknown")
    expected |= {18: "cancelled_delivered", 19: "cancelled_delivered", 20: "cancel_untrue"}
    p.cancel(23, "NOT_FOUND", at_ms=DUE_MS + 23 + BOUNDS["horizon_ms"] - 1)
    expected[23] = "cancel_untrue"
    # Told to have fired, before a request that is in the log before the FIRE.
    p.cancel(26, "ALREADY_FIRED", client="told", request=1, answered=2)
    p.asked_by(27, "told", 3, 7)
    expected[26] = "cancel_untrue"
    p.cancel(24, "DROPPED")
    p.pending(25, DUE_MS + 25)
    p.change(25, end="held")
    p.cancel(25, "NOT_FOUND", at_ms=DUE_MS + 25 + 2 * BOUNDS["horizon_ms"])
    expected |= dict.fromkeys((24, 25), "cancel_untrue")
    p.acks = [ack for ack in p.acks if ack["queue_offset"] != 21]
    expected[21] = "ack_lost"
    # Given after it had expired: by an attempt that the log counted later; by a later epoch.
    for mark, after in ((31, {"attempts": [2]}), (32, {"epoch": 2})):
        p.expire(mark)
        p.drop(mark, "deliver")
        p.give(mark, **after)
        expected[mark] = "expired_delivered"
    # Expired before its time; told so, though it lives; told to be acked, though it had expired.
    p.expire(34, after_ms=49)
    p.say(35, "EXPIRED")
    p.acks = [ack for ack in p.acks if ack["queue_offset"] != 35]
    p.expire(36)
    p.ack(36)
    p.acks.pop()
    expected |= {34: "expired_early", 35: "ack_lost", 36: "ack_lost"}
    return Case(p, expected)


def plant_early(p: Planted, expected: dict[int, str]) -> None:
    # Early: on the cluster's clock; and a due time before the one asked for.
    p.change(7, ended_at_ms=DUE_MS + 6)
    p.drop(7, "deliver", "ack")
    p.give(7, fired_at_ms=[DUE_MS + 6])
    p.change(8, due_ms=DUE_MS + 7)
    p.answer(8, DUE_MS + 7)
    expected |= dict.fromkeys((7, 8), "early")
    # By the clients' clocks: it came early; it is due before, and after, its delay is over.
    p.drop(37, "deliver")
    p.give(37, received_ms=DUE_MS + 37 - ERROR_MS - 1)
    p.delay(38, DUE_MS + 38 + ERROR_MS)
    p.delay(39, DUE_MS + 39 - ERROR_MS - BOUNDS["tick_ms"] - 3)
    expected |= {37: "early", 38: "early", 39: "misdated"}


def of_changes() -> Case:
    """Every violation that is about keys or changes."""
    p = Planted(range(1, 41))
    expected, old = dict.fromkeys(range(1, 41), "ok"), dict[int, str]()
    plant_reschedules(p, expected, old)
    plant_keys(p, expected)
    return Case(p, expected, old)


def plant_reschedules(p: Planted, expected: dict[int, str], old: dict[int, str]) -> None:
    """Plant violations in timers 1 to 11."""
    # Rescheduled, and given under its old id all the same; told so, but the old one fired.
    p.moved(1)
    p.give(1)
    old[1] = "rescheduled_delivered"
    p.move(2, "RESCHEDULED")  # and the new one is in no log: lost, without a mark
    expected[2] = "rescheduled_delivered"
    # The new one: fired twice; before its due time; at an earlier time than was asked for.
    for mark in range(3, 10):
        p.moved(mark)
    p.give(
        3, offsets=[99], attempts=[2], ids=[id_of(DUE_MS + 503, 1003)], fired_at_ms=[DUE_MS + 503]
    )
    expected[3] = "duplicate_fire"
    for fate in p.fates:
        if fate["seq"] == 1004:
            fate["ended_at_ms"] = DUE_MS + 4  # its old due time
    p.lines = [li for li in p.lines if not (li["op"] == "deliver" and li["offsets"] == [1004])]
    p.give(4, offsets=[1004], ids=[id_of(DUE_MS + 504, 1004)], fired_at_ms=[DUE_MS + 4])
    for line in p.lines:
        if line["op"] == "reschedule" and line["new_ids"] == [id_of(DUE_MS + 505, 1005)]:
            line["due_ms"] = [DUE_MS + 506]
    expected |= dict.fromkeys((4, 5), "early")
    # Never given; nobody asked for it; refused; told of another timer; an untrue answer.
    p.lines = [li for li in p.lines if not (li["op"] == "deliver" and li["offsets"] == [1006])]
    expected[6] = "lost"
    p.lines = [li for li in p.lines if li.get("new_ids") != [id_of(DUE_MS + 507, 1007)]]
    expected[7] = "phantom"
    for line in p.lines:
        if line.get("new_ids") == [id_of(DUE_MS + 508, 1008)]:
            line["ids"] = [id_of(DUE_MS + 10, 10)]
    expected |= {8: "reschedule_untrue", 10: "rescheduled_delivered"}
    p.move(9, "ALREADY_FIRED")
    old[9] = "reschedule_untrue"
    p.move(11, "ALREADY_CANCELLED")
    # Told to have fired, before a cancel that is in the log before the FIRE.
    p.move(40, "ALREADY_FIRED", client="moved", request=1, answered=2)
    expected |= dict.fromkeys((11, 40), "reschedule_untrue")


def plant_keys(p: Planted, expected: dict[int, str]) -> None:
    """Plant violations in timers 12 to 35."""
    # Replaced: given all the same; told so, but it fired, or was cancelled.
    for mark in (12, 14, 16):
        p.keyed(mark, f"k{mark}")
        p.keyed(mark + 1, f"k{mark}", "REPLACED", existing=mark)
        p.change(mark + 1, other_seq=mark, schedule_index=5)
        p.ended(mark, "replaced")
    p.give(12)
    p.change(14, end="fired", end_index=5, ended_at_ms=DUE_MS + 14)
    p.give(14)
    p.cancelled(16)
    p.cancel(16, "CANCELLED", client="moved", request=3)
    expected |= dict.fromkeys((12, 14), "replaced_delivered") | {16: "conflict_untrue"}
    # A key that was taken: a timer all the same, by the answer or by a delivery; two pending.
    for mark in (18, 20, 22):
        p.keyed(mark, f"k{mark}")
        p.no_timer(mark + 1, "rejected", mark, f"k{mark}")
    p.keyed(19, "k18", on_conflict="reject", ids=[id_of(DUE_MS + 19, 19)])
    p.give(21)
    p.change(23, end="fired", queue_offset=23, end_index=9, other_seq=None)
    p.give(23)
    expected |= dict.fromkeys((19, 21, 23), "key_doubled")
    # Answers of conflicts that the log contradicts.
    for mark in (24, 27, 30):
        p.keyed(mark, f"k{mark}")
        p.no_timer(mark + 1, "kept", mark, f"k{mark}")
        expected[mark + 1] = "kept"
    p.keyed(25, "k24", "REJECTED", existing=24)
    p.keyed(28, "k27", "KEPT", existing=26)
    p.keyed(31, "k30", "KEPT", existing=30, on_conflict="reject")
    expected |= dict.fromkeys((25, 28, 31), "conflict_untrue")
    p.keyed(32, "k32", "KEPT", existing=31)  # and a timer
    # Updates that found no timer: one was pending, or the row is one, or it was no update.
    p.no_timer(37, "rejected", 36, "k36")
    p.keyed(37, "k36", "NOT_PENDING")
    p.keyed(38, "k38", "NOT_PENDING")
    p.drop(39, "deliver", "ack")
    p.change(39, end="rejected", queue_offset=None, end_index=1, other_seq=None)
    p.keyed(39, "k39", "NOT_PENDING", on_conflict="replace")
    expected |= dict.fromkeys((37, 38, 39), "conflict_untrue")
    expected[32] = "conflict_untrue"
    # Cancelled by key, by the answer, but it fired.
    p.keyed(33, "k33")
    p.lines.append({"op": "cancel", "client": "c", "start_ms": 3, "end_ms": 4, "outcome": "ok",
                    "topic": "t", "keys": ["k33"], "results": ["CANCELLED"]})  # fmt: skip
    expected[33] = "cancelled_delivered"
    # Cancelled, but nobody asked: the filter is of other keys, or of other times.
    for mark in (34, 35):
        p.cancelled(mark)
        p.keyed(mark, f"k{mark}")
        other = {"key_prefix": "x"} if mark == 34 else {"due_to_ms": DUE_MS + 34}
        p.lines.append({"op": "cancel", "client": "c", "start_ms": 3, "end_ms": 4, "outcome": "ok",
                        "topic": "t", "changed": 1, **other})  # fmt: skip
    expected |= dict.fromkeys((34, 35), "lost")


def honest_changes() -> Case:
    """Keys and changes as they should be; the last line is of an answered cancel by filter."""
    p = Planted(range(1, 21))
    expected = dict.fromkeys(range(1, 21), "ok")
    # Rescheduled by id, by key, by filter; with answers and without.
    p.moved(1)
    p.moved(2, by="k2")
    p.moved(3, by="filter")
    for mark in (1, 2, 3):
        p.keyed(mark, f"k{mark}")
    for mark, by in ((4, "id"), (5, "n5"), (6, "filter")):
        p.keyed(mark, "n5" if mark == 5 else f"k{mark}")
        p.moved(mark, by=by)
        p.lines[-1] |= {"outcome": "unknown"} | dict.fromkeys(("results", "new_ids", "changed"))
    expected |= dict.fromkeys((4, 5), "unknown_fired_once")
    # Told the truth of what had ended.
    p.move(1, "ALREADY_CANCELLED")
    p.move(7, "ALREADY_FIRED")
    p.move(8, None)
    # A key handed on: replaced, then free; kept and rejected by the one that has it; of no timer.
    p.keyed(9, "k9")
    p.ended(9, "replaced")
    p.keyed(10, "k9", "REPLACED", existing=9)
    p.change(10, other_seq=9, schedule_index=5, end_index=7)
    p.keyed(11, "k9")
    p.change(11, schedule_index=8)
    p.no_timer(12, "kept", 11, "k9")
    p.no_timer(13, "rejected", 11, "k9")
    p.change(14, schedule_index=8, end_index=8)  # due already: never pending
    p.keyed(14, "k9", on_conflict="keep")
    expected |= {9: "replaced", 12: "kept", 13: "rejected"}
    p.no_timer(15, "kept", 11, "k9")
    p.drop(15, "schedule")
    p.ask(15, "unknown")
    p.keyed(15, "k9", on_conflict="keep", results=None)
    expected[15] = "unknown_not_fired"
    # An update that found no timer; a cancel of the old id of a rescheduled timer.
    p.drop(20, "deliver", "ack")
    p.change(20, end="rejected", queue_offset=None, end_index=1, other_seq=None)
    p.keyed(20, "k20", "NOT_PENDING")
    expected[20] = "rejected"
    p.lines.append({"op": "cancel", "client": "c", "start_ms": 3, "end_ms": 4, "outcome": "ok",
                    "ids": [id_of(DUE_MS + 1, 1)], "results": ["RESCHEDULED"]})  # fmt: skip
    # Cancelled by key and by filter, and by cancels whose answers were lost.
    for mark in (16, 17, 18, 19):
        p.cancelled(mark)
        p.keyed(mark, f"c{mark}")
        what = {"keys": [f"c{mark}"]} if mark < 18 else {"key_prefix": "c"}
        answer = {"results": ["CANCELLED"]} if mark < 18 else {"changed": 1}
        fate = {"outcome": "ok", **answer} if mark % 2 else {"outcome": "unknown"}
        p.lines.append({"op": "cancel", "client": "c", "start_ms": 3, "end_ms": 4, "topic": "t",
                        **what, **fate})  # fmt: skip
        expected[mark] = "cancelled"
    return Case(p, expected)


def honest() -> Case:
    """Events that look wrong and are right."""
    p = Planted(range(1, 21))
    expected = dict.fromkeys(range(1, 21), "ok")
    # By as much as the clocks may differ.
    p.drop(18, "deliver")
    p.give(18, received_ms=DUE_MS + 18 - ERROR_MS)
    p.delay(19, DUE_MS + 19 + ERROR_MS - 1)
    p.delay(20, DUE_MS + 20 - ERROR_MS - BOUNDS["tick_ms"] - 2)
    # Redelivered, and marked as such, before its ack in the log's order. The second copy had a
    # long way: its receiver's clock says that it came after the ack was confirmed.
    for mark, received_ms in ((1, DUE_MS + 15), (2, DUE_MS + 99)):
        p.change_ack(mark, attempts=2)
        p.give(mark, attempts=[2], received_ms=received_ms, epoch=1)
    # Dropped by a logged policy.
    p.cancelled(3)
    p.change(3, end="dropped")
    p.cancel(3, "DROPPED")
    expected[3] = "dropped"
    # Held by a logged pause when the run ended, as long as it was overdue.
    p.pending(13, DUE_MS + 13)
    p.change(13, end="held")
    expected[13] = "held"
    # Cancels answered truly, or never answered.
    p.cancelled(4)
    p.cancel(4, "CANCELLED")
    p.cancel(4, "ALREADY_CANCELLED")
    # A request before the answer is in the log before the FIRE, one after the answer behind it.
    p.cancel(5, "ALREADY_FIRED", client="honest", request=2, answered=3)
    p.asked_by(1, "honest", 1, 7)
    p.asked_by(2, "honest", 4, 10)
    p.cancel(12, "NOT_FOUND", at_ms=DUE_MS + 12 + BOUNDS["horizon_ms"])
    p.cancelled(6)
    p.cancel(6, None, "unknown")
    expected |= {4: "cancelled", 6: "cancelled"}
    # Schedules whose answers were lost, or which were refused.
    for mark, outcome, log in ((7, "unknown", False), (8, "unknown", True), (9, "fail", True)):
        p.drop(mark, "schedule", *(("deliver", "ack") if log else ()), log=log)
        p.ask(mark, outcome)
    expected |= {7: "unknown_fired_once", 8: "unknown_not_fired", 9: "refused"}
    # Due after the end of the run.
    p.pending(10, UNTIL_MS)
    p.answer(10, UNTIL_MS)
    [asked] = [line for line in p.lines if line.get("marks") == [10]]
    asked["due_ms"] = [UNTIL_MS]
    expected[10] = "pending"
    # A late copy from a deposed leader, which a client could not know to be stale.
    p.change(11, end_epoch=1)
    p.change_ack(11, ack_epoch=2, attempts=3)
    p.give(11, attempts=[2], received_ms=DUE_MS + 50, epoch=1)
    # Expired: before anybody got it; while somebody held it.
    p.expire(14)
    p.drop(14, "deliver")
    p.expire(15)
    expected[14] = "expired"
    # Told so, and it was; told of one that was acked below it.
    p.expire(16)
    p.ack(16)
    p.acks.pop()
    for mark in (16, 17):
        p.say(mark, "EXPIRED")
    return Case(p, expected)


def given_by_others() -> Case:
    """Timers that are fine, but for deliveries that name them under another timer's mark."""
    p = Planted(range(1, 5))
    for mark, other in ((2, 999), (3, 4)):
        p.give(mark, marks=[other])
    return Case(p, {1: "ok", 2: "diverged", 3: "diverged", 4: "ok"})


def postponed() -> Case:
    """Timers of a topic in which they are due later than was asked for, by POSTPONED_MS."""
    p = Planted(range(1, 5))
    off_ms = ERROR_MS + BOUNDS["tick_ms"] + POSTPONED_MS
    p.delay(1, DUE_MS + 1 - off_ms - 2)
    p.delay(2, DUE_MS + 2 - off_ms - 3)
    p.delay(3, DUE_MS + 3 + ERROR_MS)
    return Case(p, {1: "ok", 2: "misdated", 3: "early", 4: "ok"})
