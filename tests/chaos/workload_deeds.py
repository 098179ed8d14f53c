"""A run of all workloads against a real cluster, and what its histories have to show."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

from chaos import workloads
from chaos.history.history import CLOCK_ERROR, RunFolder
from chaos.suite.stage.states import StateRecorder
from chaos.workloads import Workloads
from chaos.workloads.workload_clients import Setting
from tests.cluster.running import Running, until

SECONDS: Final = 7.0
RATE_PER_S: Final = 400
DEEDS_S: Final = 300.0
"""For the rarest of what the workloads do by chance, on a machine that has little time for it."""
LOOK_S: Final = 0.5
"""Between two looks at what they did: who looks takes time from the clients, which are threads."""

Line = dict[str, Any]


class Deeds:
    """What the histories of a run say that the workloads did, up to now."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._lines: dict[str, list[Line]] = {}
        self._read: dict[str, int] = {}
        self.read_on()

    def read_on(self) -> None:
        """Read what was written since."""
        for path in sorted(self._run.histories.iterdir()):
            with path.open("rb") as file:
                file.seek(self._read.get(path.stem, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path.stem] = self._read.get(path.stem, 0) + len(whole + newline)
            lines = self._lines.setdefault(path.stem, [])
            lines += [json.loads(line) for line in whole.splitlines()]

    def of(self, name: str, op: str) -> list[Line]:
        """Return the lines of one operation from all histories whose names begin with `name`."""
        found = chain.from_iterable(
            lines for stem, lines in self._lines.items() if stem.startswith(name)
        )
        return [line for line in found if line["op"] == op and line.get("outcome") != "asked"]

    def results(self, name: str, op: str) -> set[str]:
        return {*flat(self.of(name, op), "results")}

    def asked(self, name: str) -> list[Line]:
        """Return its requests for timers that name due times."""
        return [line for line in self.of(f"{name}-", "schedule") if line["due_ms"]]

    def asked_of(self, name: str, outcome: str, said: str = "") -> list[Line]:
        """Return its requests for timers that ended so, with that in the error's text."""
        asked = self.of(f"{name}-", "schedule")
        return [x for x in asked if x["outcome"] == outcome and said in x.get("detail", "")]

    def rules(self, name: str) -> list[dict[str, Any]]:
        """Return what it let its topic's policy say, as far as that was confirmed."""
        said = self.of(f"{name}-", "policy")
        return [json.loads(line["said"]) for line in said if line["outcome"] == "ok"]

    def at_once(self, name: str) -> bool:
        """Whether a request began before the one before it had ended."""
        found = sorted(self.asked(name), key=lambda line: line["start_ms"])
        return any(after["start_ms"] < before["end_ms"] for before, after in pairwise(found))

    def passed_over(self, name: str) -> bool:
        """Whether a group was given an offset, and not the one before it."""
        offsets = {*flat(self.of(name, "deliver"), "offsets")}
        return any(at > min(offsets) and at - 1 not in offsets for at in offsets)

    def ways(self, name: str) -> set[tuple[str, str]]:
        """Return the (operation, how it named its timers) of all changes."""
        return {
            (op, "ids" if line.get("ids") else ("keys" if line.get("keys") else "filter"))
            for op in ("cancel", "reschedule")
            for line in self.of(name, op)
        }


def flat(found: list[Line], field: str) -> list[Any]:
    """Return the elements of a list of all lines, one after the other."""
    return [*chain.from_iterable(line.get(field) or () for line in found)]


def _marks_by_id(found: list[Line]) -> list[int]:
    """Return the mark of every id that was given, once."""
    ids = zip(flat(found, "ids"), flat(found, "marks"), strict=True)
    return [*dict(ids).values()]


WAYS: Final = {
    ("cancel", "ids"), ("cancel", "filter"),
    ("reschedule", "ids"), ("reschedule", "keys"), ("reschedule", "filter"),
}  # fmt: skip

DONE: Final[Mapping[str, Callable[[Deeds], bool]]] = {
    "a cancel was in time, repeated, and too late": lambda did: (
        {"CANCELLED", "ALREADY_CANCELLED", "ALREADY_FIRED"} <= did.results("cancels", "cancel")
    ),
    "cancels went alone and by lists": lambda did: (
        {len(line["ids"]) == 1 for line in did.of("cancels", "cancel")} == {True, False}
    ),
    "every end of an upsert": lambda did: (
        {"SCHEDULED", "REPLACED", "KEPT", "REJECTED", "NOT_PENDING"}
        == did.results("keyed", "schedule")
    ),
    "every way of an upsert": lambda did: (
        {"reject", "replace", "keep", "update"}
        <= {line.get("on_conflict") for line in did.of("keyed-", "schedule")}
    ),
    "keys were there and not there": lambda did: all(
        {"NOT_FOUND"} < did.results("keyed", op) for op in ("cancel", "reschedule")
    ),
    "a timer was moved, and one that was gone was not": lambda did: (
        {"RESCHEDULED", "ALREADY_CANCELLED"} <= did.results("moved", "reschedule")
    ),
    "changes by id, key and filter": lambda did: did.ways("moved-") == WAYS,
    "a filter picked something": lambda did: any(
        line.get("changed") for line in did.of("moved-", "reschedule")
    ),
    "a group came late": lambda did: (
        {line["group"] for line in did.of("groups", "deliver")} == {"first", "second", "late"}
    ),
    "singles and batches, some at once": lambda did: (
        {len(line["marks"]) == 1 for line in did.asked("singles")} == {True, False}
        and did.at_once("singles")
    ),
    "messages came again": lambda did: all(
        max(flat(did.of(name, "deliver"), "attempts"), default=0) > 1
        for name in ("slow", "dying", "nacking", "ordered", "failing")
    ),
    "all kinds of order were looked at": lambda did: (
        {line["group"] for line in did.of("ordered", "deliver")} == {"keys", "queue", "alone"}
    ),
    "a message failed for good": lambda did: any(
        count > 1 for count in Counter(flat(did.of("failing-strict", "nack"), "offsets")).values()
    ),
    "messages were given back": lambda did: "NACKED" in did.results("nacking", "nack"),
    "somebody gave up a timer that came": lambda did: any(
        {*line["marks"]} & {*flat(did.of("impatient", "deliver"), "marks")}
        for line in did.asked("impatient")
        if line["outcome"] == "unknown"
    ),
    "requests with an id were answered, all of them in the end": lambda did: (
        {line["outcome"] for line in did.asked("named")} == {"ok"}
    ),
    "a topic was paused, and went on in every way": lambda did: (
        {(None, True), ("all", False), ("latest", False), ("drop", False)}
        <= {(rule.get("catch_up"), rule["paused"]) for rule in did.rules("paused")}
    ),
    "what was overdue fired, and was dropped": lambda did: (
        {"ALREADY_FIRED", "DROPPED"} <= did.results("paused-", "cancel")
    ),
    "a message expired under its lease, and one unseen": lambda did: (
        "EXPIRED" in did.results("fleeting-slow", "ack") and did.passed_over("fleeting-slow")
    ),
    "a timer was asked for that had expired": lambda did: bool(
        did.asked_of("fleeting", "fail", "due_ms")
    ),
    "a group came late to what was kept": lambda did: bool(did.of("fleeting-late", "deliver")),
    "quotas refused, took, and were lifted": lambda did: (
        bool(did.asked_of("limited", "fail", "QuotaReached"))
        and bool(did.asked_of("limited", "ok"))
        and {rule["pending_max"] is None for rule in did.rules("limited")} == {True, False}
    ),
    "every scope spoke, and the narrower won": lambda did: (
        {line["topic"] for line in did.of("scoped-", "policy") if line["outcome"] == "ok"}
        == {"scoped/scoped", "scoped/", "/"}
        and all(
            did.asked_of("scoped", "fail", f"of the {scope}") for scope in ("topic", "namespace")
        )
        and bool(did.asked_of("scoped", "ok"))
    ),
    "a topic went with its timers, and was made again": lambda did: (
        len({line["topic_id"] for line in did.of("doomed-", "delete") if line.get("pending")}) > 1
    ),
    "letters were redriven, and came again as messages of their own": lambda did: (
        sum(line.get("changed") or 0 for line in did.of("redriven-", "redrive")) > 1
        and max(Counter(_marks_by_id(did.of("redriven-workers", "deliver"))).values()) > 1
    ),
    "a group was sought, and one was deleted and made again": lambda did: (
        len({life for line in did.of("sought-sought", "deliver") if (life := line["group_id"])}) > 2
        and len({line["group_id"] for line in did.of("sought-anew", "deliver")}) > 1
    ),
    "series were made both ways, changed and deleted, and their occurrences came": lambda did: (
        {"cron" in line["said"] for line in did.of("recurring", "create_series")} == {True, False}
        and bool(did.of("recurring", "alter_series"))
        and max((n or 0 for n in flat(did.of("recurring", "deliver"), "occurrences")), default=0)
        > 2
    ),
    "ordering keys and priorities were set": lambda did: (
        len({*flat(did.of("sequenced-", "schedule"), "ordering_keys")}) > 2
        and {9, 0} <= {*flat(did.of("urgent-", "schedule"), "priorities")}
    ),
    "a topic had a jitter and rates": lambda did: any(
        rule["jitter_ms"] and rule["topic_rate_max"] for rule in did.rules("smoothed")
    ),
    "bursts were under way at once": lambda did: did.at_once("overload"),
}
"""What has to happen sooner or later -> whether it has."""


def undone(did: Deeds) -> list[str]:
    did.read_on()
    return [deed for deed, happened in DONE.items() if not happened(did)]


def play(folder: Path) -> RunFolder:
    """Play all workloads into a folder until each has done its deeds; stop the nodes."""
    run = RunFolder(folder)
    run.about.write_text(json.dumps({CLOCK_ERROR: 1_000}))
    with Running(run.root).cleaned() as cluster:
        addresses = {name: node.grpc for name, node in cluster.nodes.items()}
        listener = StateRecorder(run, addresses)
        setting = Setting(
            run=run, endpoints=lambda: cluster.endpoints, seed=1, rate_per_s=RATE_PER_S,
            horizon_s=SECONDS,
        )  # fmt: skip
        works = Workloads([*workloads.KINDS], setting)
        try:
            works.start()
            each = 0.9 * SECONDS * RATE_PER_S / len(works.each)
            until(lambda: all(work.books.asked >= each for work in works.each), timeout_s=DEEDS_S)
            did = Deeds(run)
            done_by_s = time.monotonic() + DEEDS_S
            while left := undone(did):
                assert time.monotonic() < done_by_s, left
                time.sleep(LOOK_S)
            works.stop_producing()
            done_by_s = time.monotonic() + DEEDS_S
            while waiting := works.waiting():
                assert time.monotonic() < done_by_s, waiting
                time.sleep(LOOK_S)
        finally:
            works.close()
            listener.close()
    return run
