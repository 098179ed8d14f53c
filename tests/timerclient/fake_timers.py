"""Timers of the fake cluster in a plain list: schedule, cancel, reschedule, get, list and count."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from timerclient.proto import timer_pb2 as pb

PAGE = 3
"""Most rows of a page, for any requested size; a page may be shorter than requested."""


@dataclass
class Row:
    topic: str
    due_ms: int
    payload: bytes
    key: bytes
    headers: bytes
    raw: bytes = b""
    cancelled: bool = False

    @property
    def pending(self) -> bool:
        return not self.cancelled and self.payload != b"FIRED"


def slices(sizes: Iterable[int], blob: bytes) -> list[bytes]:
    out, start = [], 0
    for size in sizes:
        out.append(blob[start : start + size])
        start += size
    assert start == len(blob)
    return out


def slices_of_ids(blob: bytes) -> list[bytes]:
    return slices([15] * (len(blob) // 15), blob)


class Timers:
    """The rows of a cluster; `now_ms` is its clock."""

    def __init__(self, now_ms: int) -> None:
        self.rows: list[Row] = []
        self.now_ms = now_ms
        self.moves_max = 1 << 30
        """Most timers that one reschedule changes; the others are answered RESCHEDULE_LEFT."""

    def add(self, row: Row) -> bytes:
        row.raw = row.due_ms.to_bytes(6, "big") + len(self.rows).to_bytes(6, "big") + b"chk"
        self.rows.append(row)
        return row.raw

    def holder(self, topic: str, key: bytes) -> Row | None:
        having = [r for r in self.rows if (r.topic, r.key, r.pending) == (topic, key, True)]
        return having[0] if key and having else None

    def schedule(self, row: Row, mode: int) -> tuple[int, bytes, bytes]:
        """Return (result, id, other id)."""
        held = self.holder(row.topic, row.key)
        if held is None and mode == pb.ON_CONFLICT_UPDATE:
            return pb.SCHEDULE_RESULT_NOT_PENDING, bytes(15), bytes(15)
        if held is None:
            return pb.SCHEDULE_RESULT_SCHEDULED, self.add(row), bytes(15)
        if mode in (pb.ON_CONFLICT_REPLACE, pb.ON_CONFLICT_UPDATE):
            held.cancelled = True
            return pb.SCHEDULE_RESULT_REPLACED, self.add(row), held.raw
        if mode == pb.ON_CONFLICT_KEEP:
            return pb.SCHEDULE_RESULT_KEPT, held.raw, held.raw
        return pb.SCHEDULE_RESULT_REJECTED, bytes(15), held.raw

    def find(self, raw: bytes) -> Row | None:
        return next((row for row in self.rows if row.raw == raw), None)

    def state(self, row: Row | None) -> int:
        """Return the common value of CancelResult and RescheduleResult; 1 for a pending timer."""
        if row is None:
            return 4
        return 2 if row.cancelled else 1 if row.pending else 3

    def targets(self, request: Any) -> list[Row | None]:
        if request.HasField("keys"):
            keys = slices(request.keys.key_sizes, request.keys.keys)
            return [self.holder(request.keys.topic, key) for key in keys]
        return [self.find(raw) for raw in slices_of_ids(request.timer_ids)]

    def page(self, what: Any, token: bytes) -> tuple[list[Row], bytes]:
        """Return rows after the token, only of rows that existed at the first page's reading."""
        end, seen = token[15:] or str(len(self.rows)).encode(), token[:15]
        rows = [
            row
            for row in sorted(self.rows[: int(end)], key=lambda row: row.raw)
            if row.pending
            and row.topic == what.topic
            and what.due_from_ms <= row.due_ms < (what.due_to_ms or 1 << 60)
            and row.key.startswith(what.key_prefix.encode())
            and row.raw > seen
        ]
        return rows[:PAGE], rows[PAGE - 1].raw + end if len(rows) > PAGE else b""

    def picked(self, request: Any) -> tuple[list[Row | None], bytes]:
        """Return the rows to change and the next token; the first page of a filter has no rows."""
        if not request.HasField("filter"):
            return self.targets(request), b""
        if not request.page_token:
            return [], bytes(15) + str(len(self.rows)).encode()
        found, token = self.page(request.filter, request.page_token)
        return [*found], token

    def cancel(self, request: Any) -> pb.CancelResponse:
        targets, token = self.picked(request)
        answer = pb.CancelResponse(next_page_token=token)
        for row in targets:
            result = self.state(row)
            if row is not None and row.pending:
                row.cancelled = True
                answer.cancelled += 1
            if not request.HasField("filter"):
                answer.results.append(result)  # type: ignore[arg-type]
        return answer

    def reschedule(self, request: Any) -> pb.RescheduleResponse:
        targets, token = self.picked(request)
        assert bool(request.due_ms) != bool(request.delay_ms)
        due = list(request.due_ms) or [self.now_ms + ms for ms in request.delay_ms]
        due = due * len(targets) if len(due) == 1 else due
        answer = pb.RescheduleResponse(next_page_token=token)
        for row, due_ms in zip(targets, due, strict=True):
            result, raw = self.state(row), bytes(15)
            if row is not None and row.pending:
                if answer.rescheduled == self.moves_max:
                    result = pb.RESCHEDULE_RESULT_LEFT
                else:
                    row.cancelled = True
                    raw = self.add(Row(row.topic, due_ms, row.payload, row.key, row.headers))
                    answer.rescheduled += 1
            if not request.HasField("filter"):
                answer.results.append(result)  # type: ignore[arg-type]
                answer.timer_ids += raw
        return answer

    def get(self, request: Any) -> pb.GetTimerResponse | None:
        row = self.find(request.timer_id)
        if request.key:
            row = self.holder(request.topic, request.key.encode())
        if row is None:
            return None
        state = {1: pb.TIMER_STATE_PENDING, 2: pb.TIMER_STATE_CANCELLED, 3: pb.TIMER_STATE_FIRED}[
            self.state(row)
        ]
        if state != pb.TIMER_STATE_PENDING:
            return pb.GetTimerResponse(state=state)
        return pb.GetTimerResponse(state=state, topic=row.topic, timer=columns([row]))

    def count(self, request: Any) -> pb.CountTimersResponse:
        if request.HasField("filter"):
            rows, token = self.page(request.filter, request.page_token)
            return pb.CountTimersResponse(pending=len(rows), next_page_token=token)
        due = [row.due_ms for row in self.rows if row.pending and row.topic == request.topic]
        horizons = [5_000, 3_600_000]
        return pb.CountTimersResponse(
            pending=len(due),
            horizon_ms=horizons,
            within=[sum(ms <= self.now_ms + horizon for ms in due) for horizon in horizons],
            clock_ms=self.now_ms,
        )


def columns(rows: list[Row]) -> pb.PendingTimers:
    return pb.PendingTimers(
        timer_ids=b"".join(row.raw for row in rows),
        due_ms=[row.due_ms for row in rows],
        payload_sizes=[len(row.payload) for row in rows],
        payloads=b"".join(row.payload for row in rows),
        key_sizes=[len(row.key) for row in rows],
        keys=b"".join(row.key for row in rows),
        headers_sizes=[len(row.headers) for row in rows],
        headers=b"".join(row.headers for row in rows),
    )
