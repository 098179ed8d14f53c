"""Turns of the suite, for tests of who waits for one."""

from chaos.suite.stage.turn import Turn


def until_asked(turn: Turn, times: int) -> None:
    """Return once turns were asked for so often."""
    with turn._changed:
        while turn._drawn < times:
            turn._changed.wait(0.01)
