"""Histories: the clients' requests, answers and deliveries, as JSON lines.

Every operation is one line, written as it ends. An operation that may change something also has a
line before it is sent, with the outcome `asked`. So a crash of the client loses only a torn last
line. Repeated values are lists, and element i of all lists belongs together: a batch of a thousand
timers is one line, not a thousand. Times are Unix milliseconds on the client's clock, except due
times, `fired_at_ms` and `handed_out_ms`, which are on the cluster's.

docs/history-format.md describes all operations, their fields and outcomes, and the marks of
payloads. chaos/history/history_check.py checks a history against it.

A run's folder:

    histories/*.jsonl   one file per client; *.parquet with the same columns is read as well
    faults.jsonl        the timeline: faults of the cluster, with times
    states.jsonl        each node's counts after an entry, and the digest of its state
    cluster.json        the nodes: name, address, data directory
    <node>/log/         the nodes' own logs (`log/` in the data directory that cluster.json names)
    nodes/<node>/kept/  the archive of a log, read instead of it. It also has the segments that the
                        node dropped, in a folder for each life of the log (000, 001, …)
    logs/               the nodes' output
    run.json            of the suite: seed, versions, machine, options, schedule. Any harness may
                        write clock_error_ms, the greatest difference between the clients' clocks
                        and the cluster's, and clients_error_ms, that between the clients' clocks
    audit/              the findings of the audit

Each line of the timeline has `event` and `at_ms`. Events of a node have `node`, and its `role` and
`epoch` at that moment. Events of a strike of the suite have `strike`, its number in the schedule,
from its `strike` (with `nemesis`) to its `healed`.

    strike, healed      a nemesis begins, and has been undone; all its other events lie between
    fizzled             between them: no victim or no effect (`why`); the strike does not count
    kill, restart       kill -9 of a node; the node is up again
    term                SIGTERM; the node has ended
    died, lost          a node ended by itself (`status`); a damaged node ended for good
    pause, resume       SIGSTOP, SIGCONT
    drained, gave_up    at the end the clients received all messages; or did not, in time
"""

import bisect
import enum
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from timer.files.data_directory import read_identity
from timer.files.disk import RealDisk
from timer.model.timer_errors import StorageError
from timerspark.log.node_folders import NodeFolders

if TYPE_CHECKING:
    from timerclient.rows.messages import Batch

OWNER: Final = "HARNESS"
"""A file in the folder of a run of the suite, which its harness keeps locked."""
RUNNING: Final = "running"
"""The `state` in run.json until the harness has stopped its nodes."""
HISTORIES: Final = (".jsonl", ".parquet")
"""The suffixes of history files."""
MARK_SIZE: Final = 8
MARK_NONE: Final = -1
"""The mark of a payload too short to have one."""
_SIGN: Final = 1 << 63
MS_MAX: Final = (1 << 48) - 1
"""The latest time, in Unix milliseconds, and the longest delay."""

SCHEMA: Final = (
    "op STRING, client STRING, start_ms BIGINT, end_ms BIGINT, outcome STRING, detail STRING,"
    " topic STRING, `group` STRING, producer BIGINT, sequence BIGINT, epoch BIGINT,"
    " lease_id BIGINT, received_ms BIGINT, marks ARRAY<BIGINT>, ids ARRAY<STRING>,"
    " due_ms ARRAY<BIGINT>, results ARRAY<STRING>, offsets ARRAY<BIGINT>,"
    " attempts ARRAY<INT>, fired_at_ms ARRAY<BIGINT>, keys ARRAY<STRING>, on_conflict STRING,"
    " existing ARRAY<STRING>, new_ids ARRAY<STRING>, due_from_ms BIGINT, due_to_ms BIGINT,"
    " key_prefix STRING, changed BIGINT, handed_out_ms BIGINT, delay_ms BIGINT, lease_ms BIGINT,"
    " said STRING, topic_id BIGINT, pending BIGINT, group_id BIGINT, to_offset BIGINT,"
    " request BIGINT, group_lease_ms BIGINT, max_attempts BIGINT, max_in_flight BIGINT,"
    " payload_crcs ARRAY<BIGINT>, stream BIGINT, answered BIGINT, ordering_keys ARRAY<STRING>,"
    " priorities ARRAY<INT>, series ARRAY<BIGINT>, occurrences ARRAY<BIGINT>, key STRING"
)
"""The columns of all operations together, as a Spark schema."""
CLOCK_ERROR: Final = "clock_error_ms"
"""Field of run.json: greatest difference between the clients' clocks and the cluster's, in ms."""
CLIENTS_ERROR: Final = "clients_error_ms"
"""Field of run.json: greatest difference between two clients' clocks, in ms."""
COUNTS: Final = ("scheduled", "pending", "fired", "cancelled", "dropped")
"""The numbers of timers that a node counts (promise P7)."""
_COUNTS: Final = ", ".join(f"{name} BIGINT" for name in COUNTS)
STATES_SCHEMA: Final = f"node STRING, at_ms BIGINT, index BIGINT, digest STRING, {_COUNTS}"


def now_ms() -> int:
    """Return this machine's clock, in Unix milliseconds."""
    return time.time_ns() // 1_000_000


class OpOutcome(enum.StrEnum):
    """The outcome of an operation, as far as its client knows."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"
    ASKED = "asked"
    """The operation is about to be sent. A later line has its outcome."""


def payload_of(mark: int, size: int = MARK_SIZE) -> bytes:
    """Return a payload of `size` bytes, at least MARK_SIZE, with `mark`, 0 .. 2**63 - 1."""
    assert 0 <= mark < _SIGN, mark
    assert size >= MARK_SIZE, size
    return mark.to_bytes(MARK_SIZE, "little").ljust(size, b".")


def mark_of(payload: bytes) -> int:
    """Return the mark in a payload; MARK_NONE if the payload is too short."""
    if len(payload) < MARK_SIZE:
        return MARK_NONE
    return int.from_bytes(payload[:MARK_SIZE], "little", signed=True)


@dataclass(frozen=True, slots=True)
class RunFolder(NodeFolders):
    """The paths in the folder of one run; see the module."""

    @property
    def histories(self) -> Path:
        """The folder of the clients' histories."""
        return self.root / "histories"

    def history_files(self) -> list[Path]:
        """Return the files of `histories`, in order.

        Raises:
            FileNotFoundError: there are none.
            ValueError: a file there does not have the name of a history. If it was ignored, its
                client's operations would be missing.
        """
        files = sorted(self.histories.iterdir()) if self.histories.is_dir() else []
        for path in files:
            # Spark ignores files whose names begin with _ or a dot, even if it gets their paths.
            readable = path.suffix in HISTORIES and not path.name.startswith(("_", "."))
            if not (readable and path.is_file()):
                kinds = " or ".join(f"*{suffix}" for suffix in HISTORIES)
                raise ValueError(f"{path}: must be a file {kinds}, and begin with neither _ nor .")
        if not files:
            raise FileNotFoundError(f"{self.histories}: no histories ({', '.join(HISTORIES)})")
        return files

    @property
    def faults(self) -> Path:
        """The timeline of the cluster's faults."""
        return self.root / "faults.jsonl"

    @property
    def states(self) -> Path:
        """The nodes' reports of their own states during the run."""
        return self.root / "states.jsonl"

    @property
    def audit(self) -> Path:
        """The folder of the audit's findings."""
        return self.root / "audit"

    @property
    def about(self) -> Path:
        """The suite's description of the run: seed, versions, machine, options, schedule."""
        return self.root / "run.json"

    def read_about(self) -> dict[str, Any]:
        """Return the content of run.json; empty if there is no such file.

        Raises:
            ValueError: it is not a JSON object.
        """
        if not self.about.exists():
            return {}
        try:
            said = json.loads(self.about.read_text())
        except ValueError as error:
            raise ValueError(f"{self.about}: {error}") from error
        if not isinstance(said, dict):
            raise ValueError(f"{self.about}: must be a JSON object")
        return said

    def error_ms(self, field: str) -> int | None:
        """Return CLOCK_ERROR or CLIENTS_ERROR of run.json, in milliseconds; None: it is absent.

        Raises:
            ValueError: it is not a number of milliseconds, or run.json is not a JSON object.
        """
        error_ms = self.read_about().get(field)
        if error_ms is None or (type(error_ms) is int and 0 <= error_ms <= MS_MAX):
            return error_ms
        limit = f"must be an integer from 0 to {MS_MAX}, milliseconds"
        raise ValueError(f"{self.about}: {field} = {error_ms!r}: {limit}")

    def replicas(self) -> set[str]:
        """Return the replica ids of all nodes, 16 hexadecimal digits; empty if one is unknown."""
        found = set[str]()
        for data in self.data().values():
            try:
                found.add(f"{read_identity(RealDisk(), data).replica_id:016x}")
            except (FileNotFoundError, StorageError):
                return set()
        return found


class _Lines:
    """A file of JSON lines. Each line is one unbuffered write."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        written = self._file.write(data)
        assert written == len(data), (written, len(data))  # the disk is full: end the run

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class History(_Lines):
    """The history of one client. Threads may share it, because each line is one append."""

    def __init__(self, run: RunFolder, client: str) -> None:
        super().__init__(run.histories / f"{client}.jsonl")
        self._client = client
        self._numbers = itertools.count(time.time_ns())  # above those of an earlier process

    def asks(self, op: str, *, start_ms: int, **fields: Any) -> int:
        """Record an operation that is about to be sent; return its `request` number."""
        request = next(self._numbers)
        self._line(op, start_ms=start_ms, outcome=OpOutcome.ASKED, request=request, **fields)
        return request

    def change(
        self, op: str, *, span_ms: tuple[int, int], outcome: OpOutcome, **fields: Any
    ) -> None:
        """Record the end of an operation; `fields` as in docs/history-format.md."""
        start_ms, end_ms = span_ms
        end_ms = max(start_ms, end_ms)  # the clock may have been set back
        if "request" in fields:
            fields["answered"] = next(self._numbers)
        self._line(op, start_ms=start_ms, end_ms=end_ms, outcome=outcome, **fields)

    def open(self, topic: str, group: str, *, start_ms: int, **settings: int) -> None:
        """Record that this client consumes `topic` in `group` from now on.

        `settings`: lease_ms of this consumer; group_lease_ms, max_attempts and max_in_flight of the
        group, as the cluster reported them.
        """
        self._line("open", topic=topic, group=group, start_ms=start_ms, **settings)

    def receive(self, topic: str, group: str, batch: "Batch", **more: Any) -> list[int]:
        """Record a batch that has just arrived; return the marks of its messages."""
        marks = [*map(mark_of, batch.payloads)]
        self.deliver(
            topic,
            group,
            received_ms=now_ms(),
            epoch=batch.epoch,
            lease_id=batch.lease_id,
            group_id=batch.group_id,
            stream=batch.stream_no,
            handed_out_ms=batch.handed_out_ms,
            offsets=[*batch.queue_offsets],
            ids=batch.ids,
            marks=marks,
            attempts=[*batch.attempts],
            fired_at_ms=[*batch.fired_at_ms],
            due_ms=[*batch.due_ms],
            **more,
        )
        return marks

    def deliver(self, topic: str, group: str, *, received_ms: int, **columns: Any) -> None:
        """Record messages that arrived together; `columns` as in docs/history-format.md."""
        self._line("deliver", topic=topic, group=group, received_ms=received_ms, **columns)

    def _line(self, op: str, **rest: Any) -> None:
        self.write({"op": op, "client": self._client, **rest})


class FaultTimeline(_Lines):
    """The timeline of the faults that the harness injects into the cluster."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run.faults)

    def record(self, event: str, *, at_ms: int, **more: Any) -> None:
        """Record one event: kill, restart, drained, gave_up, …"""
        self.write({"event": event, "at_ms": at_ms, **more})


class States(_Lines):
    """The nodes' reports of their own states. Threads may share it."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run.states)

    def record(self, node: str, index: int, *, at_ms: int, **state: Any) -> None:
        """Record a node's COUNTS after entry `index`, or the `digest` of its CHECKPOINT."""
        self.write({"node": node, "at_ms": at_ms, "index": index, **state})


LEADER_GAP_MS: Final = 15_000
"""The aim of a mix: to kill a leader at least once in this time."""


def leader_kills(lines: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return the kills of leaders in a timeline, and the gaps between them.

    A kill counts if the node itself reported that it led.

    Returns:
        `kills`: their number. `longest_without_ms`: the longest gap from the first strike to the
        last. `long_gaps`: the number of gaps longer than LEADER_GAP_MS. `strikes_apart`: the most
        strikes between two kills, before the first or after the last. Empty: no strikes.
    """
    times: dict[str, list[int]] = {"strike": [], "kill": []}
    for line in lines:
        if line["event"] == "strike" or (line["event"], line.get("role")) == ("kill", "leader"):
            times[line["event"]].append(int(line["at_ms"]))
    strikes = times["strike"]
    if not strikes:
        return {}
    begin_ms, end_ms = min(strikes), max(strikes)
    within = [at_ms for at_ms in times["kill"] if begin_ms <= at_ms < end_ms]
    edges = [begin_ms, *sorted(within), end_ms]
    gaps_ms = [later - earlier for earlier, later in itertools.pairwise(edges)]
    over = sum(gap_ms > LEADER_GAP_MS for gap_ms in gaps_ms)
    kills = sorted(times["kill"])
    between = Counter(bisect.bisect_left(kills, at_ms) for at_ms in strikes)
    return {
        "kills": len(times["kill"]),
        "longest_without_ms": max(gaps_ms),
        "long_gaps": over,
        "strikes_apart": max(between.values()),
    }


def leader_kills_text(kills: dict[str, int]) -> str:
    """Return the result of `leader_kills` in words; empty if it is empty."""
    if not kills:
        return ""
    longest_s, long_s = kills["longest_without_ms"] / 1000, LEADER_GAP_MS / 1000
    return (
        f"leaders killed: {kills['kills']:,}; at most {longest_s:,.1f} s without a kill, longer"
        f" than {long_s:g} s {kills['long_gaps']:,} times, from the first fault to the last"
    )


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a history or a timeline; a torn last line is left out.

    Raises:
        ValueError: another line is not a JSON object.
    """
    for number, raw in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{path}:{number}: must be a JSON object")
        yield line


def read_faults(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a timeline; empty if there is no such file.

    Raises:
        ValueError: a line is malformed; see docs/audit.md.
    """
    if not path.exists():
        return []
    lines = [*read(path)]
    for number, line in enumerate(lines, start=1):
        for name, kind in (("event", str), ("at_ms", int)):
            if type(value := line.get(name)) is not kind:
                must = "a string" if kind is str else "an integer, Unix milliseconds"
                raise ValueError(f"{path}:{number}: {name} = {value!r}: must be {must}")
    return lines
