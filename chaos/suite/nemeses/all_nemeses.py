"""All nemeses by name, as schedules know them."""

from collections.abc import Mapping
from types import MappingProxyType
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

NEMESES: Final[Mapping[str, Nemesis]] = MappingProxyType(
    {
        "kill": processes.kill,
        "kill-many": processes.kill_many,
        "pause": processes.suspend_node,
        "rolling-restart": processes.rolling_restart,
        "transfers": processes.transfer_storm,
        "power-cut": processes.power_cut,
        "isolate": links.isolate,
        "one-way": links.one_way,
        "bridge": links.bridge,
        "flap": links.flap,
        "slow": links.slow,
        "near-lease": links.near_lease,
        "cut-clients": links.cut_clients,
        "clock-jump": clocks.move_clock,
        "clock-drift": clocks.move_clock,
        "damage": file_damage.damage_file,
        "fill": file_damage.fill,
        "wipe": file_damage.wipe,
        "slow-disk": disk_failures.slow_disk,
        "hanging-disk": disk_failures.hanging_disk,
        "disk-errors": disk_failures.disk_errors,
        "bad-sector": disk_failures.bad_sector,
        "torn-write": disk_failures.torn_write,
        "forget": voter_damage.forget,
        "hurt-running": running_damage.hurt_running,
        "hurt-raft": voter_damage.hurt_raft,
        "remove-cut-off": voter_damage.remove_cut_off,
        "replace-cut-off": voter_damage.replace_cut_off,
        "kill-consumer": crowd.kill_consumer,
        "flood": crowd.flood,
    }
)


def nemesis_of(strike: Strike) -> Nemesis:
    """Return a strike's nemesis.

    Raises:
        KeyError, TypeError: no nemesis has this name or these arguments. The schedule comes from
            another version.
    """
    return NEMESES[strike.nemesis](**strike.args)
