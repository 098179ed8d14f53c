"""The description of a run in run.json, printed beside the verdict, and facts of its summary.

The description changes no verdict:

scenario, seed, commit   the scenario and its seed, and the version of the suite
state                    `running`: the harness did not finish, so the run is bad
failures                 faults of the run itself; with any of them the run is bad
left_out, without        parts that the run did not test
not_struck               strikes that did not happen or had no effect, with the reason
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from chaos.audit.report.figures import PLANES
from chaos.history.history import RUNNING, RunFolder, leader_kills_text

SHOWN_MAX: Final = 10
"""The most failures in the text, and the most strikes that are listed per reason."""


def about(run: RunFolder) -> dict[str, Any]:
    """Return the fields above as run.json has them.

    The scenario, seed, commit and state are left out if missing. The lists are empty if missing or
    of another type: run.json may belong to another program and use the same names.

    Raises:
        ValueError: run.json is damaged, or its `failures` are not a list.
    """
    said = run.read_about()
    if not isinstance(failures := said.get("failures") or [], list):
        raise ValueError(f"{run.about}: failures = {failures!r}: must be a list")
    machine = _of(said, "machine", dict, {})
    names = {name: said.get(name) for name in ("scenario", "seed", "state")}
    missing = _of(said, "missing", dict, {})
    by_why: dict[str, list[dict[str, Any]]] = {}
    for each in _of(said, "not_struck", list, []):
        if isinstance(each, dict):
            by_why.setdefault(str(each.get("why")), []).append(each)
    return {
        **{k: v for k, v in (names | {"commit": machine.get("commit")}).items() if v is not None},
        "failures": [*map(str, failures)],
        "left_out": [*map(str, _of(said, "left_out", list, []))],
        "without": [f"{need}: {why}" for need, why in missing.items() if why],
        "not_struck": [f"{_strikes(each)}: {why}" for why, each in by_why.items()],
    }


def _strikes(those: list[dict[str, Any]]) -> str:
    """Return strikes by number and kind; more than SHOWN_MAX as counts per kind."""
    if len(those) <= SHOWN_MAX:
        return ", ".join(f"{each.get('strike')} {each.get('nemesis')}" for each in those)
    kinds = Counter(str(each.get("nemesis")) for each in those)
    return f"{len(those)}, " + ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())


def _of(about: dict[str, Any], name: str, kind: type, otherwise: Any) -> Any:
    value = about.get(name)
    return value if isinstance(value, kind) else otherwise


def title(about: dict[str, Any]) -> str:
    """Return the scenario, seed and commit in words; empty: run.json has none of them."""
    names = ((name, about.get(name)) for name in ("seed", "commit"))
    words = [f"{name} {value}" for name, value in names if value not in (None, "")]
    scenario = about.get("scenario")
    return ", ".join(filter(None, (scenario and str(scenario), *words)))


def limits(about: dict[str, Any]) -> list[str]:
    """Return a line for each part that the run did not test."""
    lines = [f"left out: {line}" for line in about["left_out"]]
    lines += [f"without {line}" for line in about["without"]]
    return lines + [f"not struck: {line}" for line in about["not_struck"]]


def describe(about: dict[str, Any]) -> Iterator[str]:
    """Yield the description as text, line by line, without the failures."""
    if words := title(about):
        yield f"run: {words}"
    yield from limits(about)


def failure_texts(about: dict[str, Any]) -> Iterator[str]:
    """Yield the failures of the run itself as text."""
    failures = about["failures"]
    for failure in failures[:SHOWN_MAX]:
        yield "the run itself FAILED: " + failure.strip().replace("\n", "\n    ")
    if len(failures) > SHOWN_MAX:
        yield f"… {len(failures)} failures in total, see run.json"


def why_bad(about: dict[str, Any]) -> str:
    """Return why the run is bad apart from the verdict on the promises; empty: it is not."""
    number = len(about["failures"])
    if about.get("state") == RUNNING:
        return "the harness did not finish: results that its clients waited for may be missing"
    if not number:
        return ""
    noun = "failure" if number == 1 else "failures"
    return f"the run itself failed, apart from the promises: {number} {noun}"


def facts(s: dict[str, Any]) -> Iterator[str]:
    """Yield the facts of a summary: of the log, the nodes, faults and deliveries."""
    yield from _of_nodes(s)
    if kills := leader_kills_text(s["leader_kills"]):
        yield kills
    for gap in s["failover_gaps"]:
        text = f"leader {gap['node']} killed: the next firing, of epoch {gap['epoch']}"
        yield f"{text}, came {gap['fired_after_ms']:,} ms later"
    for fault in s["faults"]:
        gaps = [
            f"no {plane} for {fault[f'{plane}_gap_ms']:,} ms, to the end"
            for plane in PLANES
            if fault[f"{plane}_gap_open"]
        ]
        if gaps:
            at_s = (fault["start_ms"] - s["timeline"]["from_ms"]) / 1000
            yield f"not recovered from {fault['fault']} at {at_s:.1f} s: {'; '.join(gaps)}"
    yield from _of_deliveries(s)


def _of_nodes(s: dict[str, Any]) -> Iterator[str]:
    points, unbalanced = s["conservation"], s["violations"].get("unbalanced_checkpoints", 0)
    yield (
        f"{s['entries']:,} log entries on a majority, {s['stale_entries']} stale entries;"
        f" counts balanced at {points['checkpoints'] - unbalanced}"
        f" of {points['checkpoints']} checkpoints"
    )
    said = points["said"]
    if said["nodes"]:
        yield (
            f"{said['nodes']} nodes reported their counts {said['counts']:,} times, and"
            f" {said['digests']:,} digests of their states"
        )
    if s["files"]:
        told = (f"{e['node']} {e['pending']:,} after entry {e['index']:,}" for e in s["files"])
        unread = f"; not read: {', '.join(s['files_unread'])}" if s["files_unread"] else ""
        yield f"pending in nodes' files: {', '.join(told)}{unread}"
    for hole in s["holes"]:
        span = f"{hole['from']} .. {hole['to']}"
        yield f"{hole['node']}'s log never held entries {span}: it began later, or ended earlier"
    for part in s["thin"]:
        span = f"{part['from']} .. {part['to']}"
        yield f"entries {span} are on fewer than a majority: some logs began later"


def _of_deliveries(s: dict[str, Any]) -> Iterator[str]:
    if unjudged := s["waits"]["unjudged"]:
        deliveries = s["delivered"] + s["redelivered"]
        yield (
            f"{unjudged:,} of {deliveries:,} deliveries were late during a fault or to a busy"
            " consumer, and were not judged"
        )
    if late := s["arrived_after_ack"]:
        yield (
            f"{late:,} deliveries arrived after the ack was confirmed, by the clients' clocks;"
            " they may have been sent before"
        )
    if s["acks_unasked"] is None:
        yield "too many acks to look for acks that no history requested"
    elif s["acks_unasked"]:
        yield f"{s['acks_unasked']:,} messages are acked without a request in any history"
    if unjudged := s["fired_answers"]["unjudged"]:
        answers = s["fired_answers"]["answers"]
        yield f"{unjudged:,} of {answers:,} answers ALREADY_FIRED, close to the firing: not judged"
