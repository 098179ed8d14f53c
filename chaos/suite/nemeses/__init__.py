"""Nemeses: one module per kind of fault.

NEMESES lists them by name. `nemesis.py` defines their protocol.
"""

from collections.abc import Mapping
from typing import Final

from chaos.suite.nemeses import crowd, disk_failures, file_damage, links, processes, voter_damage
from chaos.suite.nemeses.nemesis import Nemesis

NEMESES: Final[Mapping[str, Nemesis]] = {
    name.replace("_", "-"): each
    for module in (processes, links, file_damage, disk_failures, voter_damage, crowd)
    for name, each in vars(module).items()
    if isinstance(each, Nemesis)
}
"""Name of the function, with hyphens -> nemesis."""
