"""What a run says of itself in run.json, to be read beside the verdict: it changes none.

scenario, seed, commit   what was played, by which version of the suite
state                    `running`: the harness did not come to its end
failures                 what went wrong with the run itself; with either, nobody may call it good
left_out, without        what nobody should think was tested
not_struck               which strikes did not fall, or had no effect, and why
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from chaos.history.history import RUNNING, RunFolder

SHOWN_MAX: Final = 10
"""Failures that the text shows, and strikes of one kind of miss; run.json has all."""


def about(run: RunFolder) -> dict[str, Any]:
    """Return what run.json says of the above; what it does not say is missing.

    Raises:
        ValueError: run.json is damaged, or its `failures` are no list. The rest may be another's
            of the same name, and is left out then.
    """
    said = run.said()
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
    """Return strikes by number and kind; many of them by kind alone."""
    if len(those) <= SHOWN_MAX:
        return ", ".join(f"{each.get('strike')} {each.get('nemesis')}" for each in those)
    kinds = Counter(str(each.get("nemesis")) for each in those)
    return f"{len(those)}, " + ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())


def _of(said: dict[str, Any], name: str, kind: type, otherwise: Any) -> Any:
    value = said.get(name)
    return value if isinstance(value, kind) else otherwise


def title(said: dict[str, Any]) -> str:
    """Return in words what was played; empty: nobody says."""
    names = ((name, said.get(name)) for name in ("seed", "commit"))
    words = [f"{name} {value}" for name, value in names if value not in (None, "")]
    scenario = said.get("scenario")
    return ", ".join(filter(None, (scenario and str(scenario), *words)))


def limits(said: dict[str, Any]) -> list[str]:
    """Return in words what the run does not show, whatever its verdict is."""
    lines = [f"left out: {line}" for line in said["left_out"]]
    lines += [f"without {line}" for line in said["without"]]
    return lines + [f"not struck: {line}" for line in said["not_struck"]]


def describe(said: dict[str, Any]) -> Iterator[str]:
    """Yield all of it as text."""
    if words := title(said):
        yield f"run: {words}"
    yield from limits(said)
    failures = said["failures"]
    for failure in failures[:SHOWN_MAX]:
        yield "the run itself FAILED: " + failure.strip().replace("\n", "\n    ")
    if len(failures) > SHOWN_MAX:
        yield f"… {len(failures)} failures in all, in run.json"


def why_bad(said: dict[str, Any]) -> str:
    """Return why the run is not good, whatever the verdict on the promises; empty: it may be."""
    number = len(said["failures"])
    if said.get("state") == RUNNING:
        return "the harness did not come to its end: what its clients waited for may be missing"
    if not number:
        return ""
    noun = "failure" if number == 1 else "failures"
    return f"the run itself failed, apart from the promises: {number} {noun}"
