"""Nemeses with arguments, for tests that look at a cluster between a strike and its undo."""

import contextlib
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest

from chaos.history.history import read
from chaos.suite.nemeses.nemesis import Nemesis
from chaos.suite.stage.stage import Stage

Undo = Callable[[], object]


class Blow:
    """A nemesis with arguments."""

    def __init__(self, nemesis: Nemesis, *args: Any, **more: Any) -> None:
        self.nemesis = nemesis
        bound = inspect.signature(nemesis.strike).bind(None, None, *args, **more).arguments
        self.args = dict([*bound.items()][2:])

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Inject the fault and return the function that ends it."""
        exits = contextlib.ExitStack()
        exits.enter_context(self.nemesis.strike(stage, chance, **self.args))
        return exits.close


def needs(stage: Stage, nemesis: Nemesis) -> None:
    """Skip the test if the machine cannot inject the fault."""
    for need in nemesis.needs & stage.missing.keys():
        pytest.skip(f"{nemesis.strike.__name__} WAS NOT TESTED: {need}: {stage.missing[need]}")


def recorded(stage: Stage, event: str) -> dict[str, Any]:
    """Return the last line of the timeline of that kind."""
    return [line for line in read(stage.run.faults) if line["event"] == event][-1]
