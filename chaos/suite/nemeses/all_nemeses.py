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

NEMESES: Final[Mapping[str, type[Nemesis]]] = MappingProxyType(
    {
        "kill": processes.Kill,
        "kill-many": processes.KillMany,
        "pause": processes.SuspendNode,
        "rolling-restart": processes.RollingRestart,
        "transfers": processes.TransferStorm,
        "power-cut": processes.PowerCut,
        "isolate": links.Isolate,
        "one-way": links.OneWay,
        "bridge": links.Bridge,
        "flap": links.Flap,
        "slow": links.Slow,
        "near-lease": links.NearLease,
        "cut-clients": links.CutClients,
        "clock-jump": clocks.MoveClock,
        "clock-drift": clocks.MoveClock,
        "damage": file_damage.DamageFile,
        "fill": file_damage.Fill,
        "wipe": file_damage.Wipe,
        "slow-disk": disk_failures.SlowDisk,
        "hanging-disk": disk_failures.HangingDisk,
        "disk-errors": disk_failures.DiskErrors,
        "bad-sector": disk_failures.BadSector,
        "torn-write": disk_failures.TornWrite,
        "forget": voter_damage.Forget,
        "hurt-running": running_damage.HurtRunning,
        "hurt-raft": voter_damage.HurtRaft,
        "remove-cut-off": voter_damage.RemoveCutOff,
        "replace-cut-off": voter_damage.ReplaceCutOff,
        "kill-consumer": crowd.KillConsumer,
        "flood": crowd.Flood,
    }
)


def nemesis_of(strike: Strike) -> Nemesis:
    """Return a strike's nemesis.

    Raises:
        KeyError, TypeError: no nemesis has this name or these arguments. The schedule comes from
            another version.
    """
    return NEMESES[strike.nemesis](**strike.args)
