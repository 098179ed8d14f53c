"""Turns of the suite, for tests of nemeses that wait for a turn."""

from chaos.suite.stage.turn import Turn


def until_asked(turn: Turn, times: int) -> None:
    """Return after `times` requests for a turn."""
    with turn._changed:
        while turn._drawn < times:
            turn._changed.wait(0.01)
