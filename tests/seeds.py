"""Seeds of the tests that try many: a few for `make test`, all for `make test-long`."""

from typing import Any

import pytest


def seeds(quick: int, count: int) -> list[Any]:
    """Return `count` seeds as parameters; all except the first `quick` have the mark `long`."""
    return [
        *range(quick),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(quick, count)),
    ]
