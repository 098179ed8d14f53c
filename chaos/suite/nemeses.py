"""All nemeses by name, as schedules know them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from chaos.suite import clocks, crowd, damage, failing, links, processes, voting
from chaos.suite.nemesis import Nemesis
from chaos.suite.plan import Need, Strike

NEMESES: Final[Mapping[str, type[Nemesis]]] = MappingProxyType(
    {
        "kill": processes.Kill,
        "kill-many": processes.KillMany,
        "pause": processes.Pause,
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
        "clock-jump": clocks.ClockJump,
        "clock-drift": clocks.ClockDrift,
        "truncate": damage.Truncate,
        "flip": damage.Flip,
        "remove": damage.Remove,
        "fill": damage.Fill,
        "wipe": damage.Wipe,
        "slow-disk": failing.SlowDisk,
        "hanging-disk": failing.HangingDisk,
        "disk-errors": failing.DiskErrors,
        "bad-sector": failing.BadSector,
        "torn-write": failing.TornWrite,
        "forget": voting.Forget,
        "hurt-raft": voting.HurtRaft,
        "remove-cut-off": voting.RemoveCutOff,
        "replace-cut-off": voting.ReplaceCutOff,
        "kill-consumer": crowd.KillConsumer,
        "flood": crowd.Flood,
    }
)


def nemesis_of(strike: Strike) -> Nemesis:
    """Return a strike's nemesis.

    Raises:
        KeyError, TypeError: the schedule is of another version: no such name or argument.
    """
    return NEMESES[strike.nemesis](**strike.args)


def needs_of(strike: Strike) -> frozenset[Need]:
    """Return what a strike needs of the machine."""
    return NEMESES[strike.nemesis].needs
