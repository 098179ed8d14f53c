"""The fault timeline: windows from strike to heal, and the phases that they make."""

from dataclasses import replace
from typing import Any

from chaos.audit.rules.fault_windows import Fault, Phase, phases, windows


def line(event: str, at_ms: int, **more: Any) -> dict[str, Any]:
    return {"event": event, "at_ms": at_ms, **more}


def spans(lines: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(fault.label, fault.start_ms, fault.heal_ms) for fault in windows(lines, 1000)]


def test_kill_lasts_until_its_node_is_restarted() -> None:
    lines = [
        line("kill", 100, node="n1", role="leader", epoch=3),
        line("kill", 150, node="n2", role="follower"),
        line("restart", 200, node="n1"),
        line("restart", 300, node="n2"),
        line("drained", 900),
    ]
    assert spans(lines) == [("kill leader n1", 100, 200), ("kill follower n2", 150, 300)]


def test_strike_lasts_until_the_one_of_its_number_has_healed() -> None:
    lines = [
        line("strike", 100, nemesis="partition", strike=1),
        line("strike", 200, nemesis="slow", strike=2),
        line("healed", 300, strike=1),
    ]
    assert spans(lines) == [("partition", 100, 300), ("slow", 200, 1000)]


def test_kill_within_a_strike_names_its_victim_and_is_no_fault_of_its_own() -> None:
    lines = [
        line("strike", 100, nemesis="kill_leader", strike=0),
        line("kill", 101, node="n1", role="leader", strike=0),
        line("restart", 200, node="n1", strike=0),
        line("healed", 210, strike=0),
        line("pause", 300, node="n2", role="follower"),
        line("resume", 400, node="n2"),
    ]
    assert spans(lines) == [("kill_leader leader n1", 100, 210), ("pause follower n2", 300, 400)]


def test_strike_that_fizzled_is_no_fault_but_a_kill_in_it_is() -> None:
    lines = [
        line("strike", 100, nemesis="truncate", strike=0),
        line("kill", 101, node="n1", role="follower", strike=0),
        line("restart", 200, node="n1", strike=0),
        line("fizzled", 205, why="nothing to lose", strike=0),
        line("healed", 210, strike=0),
        line("strike", 300, nemesis="kill-consumer", strike=1),
        line("fizzled", 310, why="nobody consumes", strike=1),
        line("healed", 320, strike=1),
        line("strike", 400, nemesis="slow", strike=2),
        line("healed", 500, strike=2),
    ]
    assert spans(lines) == [("kill follower n1", 101, 200), ("slow", 400, 500)]


def fault(start_ms: int, heal_ms: int, recovered_ms: int) -> Fault:
    (made,) = windows([line("strike", start_ms, nemesis="x", strike=1)], 0)
    return replace(made, heal_ms=heal_ms, recovered_ms=recovered_ms)


def test_phases_are_disjoint_and_a_fault_wins_over_a_recovery() -> None:
    faults = [fault(100, 200, 250), fault(220, 300, 300), fault(290, 310, 330)]
    assert phases(faults) == [
        Phase("fault", 100, 200),
        Phase("recovery", 200, 220),
        Phase("fault", 220, 310),
        Phase("recovery", 310, 330),
    ]
    assert phases([]) == []
