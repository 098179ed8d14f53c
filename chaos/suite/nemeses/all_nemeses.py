"""All nemeses by name, as schedules know them."""

from collections.abc import Mapping
from typing import Final

from chaos.suite.nemeses import (
    clocks,
    crowd,
    disk_failures,
    file_damage,
    links,
    processes,
    running_damage,
    voter_damage,
)
from chaos.suite.nemeses.nemesis import Nemesis
from chaos.suite.stage.plan import Strike

NEMESES: Final[Mapping[str, Nemesis]] = {
    name.replace("_", "-"): each
    for module in (
        processes, links, clocks, file_damage, disk_failures, running_damage, voter_damage, crowd
    )
    for name, each in vars(module).items()
    if isinstance(each, Nemesis)
}  # fmt: skip
"""Name of the function, with hyphens -> nemesis."""


def nemesis_of(strike: Strike) -> Nemesis:
    """Return a strike's nemesis.

    Raises:
        KeyError, TypeError: no nemesis has this name or these arguments. The schedule comes from
            another version.
    """
    return NEMESES[strike.nemesis](**strike.args)
