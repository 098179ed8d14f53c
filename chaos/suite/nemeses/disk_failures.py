"""Nemeses of disks that fail: slow, hanging, with errors, unreadable in part, a write torn.

They change the results of the node's own system calls (chaos/suite/stage/disk_faults.py), so they
work on every machine. A fault that none of these calls met had no effect.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from chaos.suite.nemeses import file_damage
from chaos.suite.nemeses.file_damage import LOG
from chaos.suite.nemeses.nemesis import Nemesis, NoEffect, choose, label, revive, survivors, until
from chaos.suite.stage.disk_faults import Calls, Kind
from chaos.suite.stage.stage import READY_S, Stage
from cluster.settings.exit_codes import ExitCode

MEETS_S: Final = 20.0
"""A node's calls meet a fault of its disk within this, because every node writes all the time."""
_BAD_SECTOR: Final = "bad-sector"


def _delay_disk(
    stage: Stage, chance: random.Random, who: str = "leader", delay_ms: int = 0,
    calls: str = Calls.SYNCS,
) -> Iterator[None]:  # fmt: skip
    """Every sync of a node's disk takes longer, or calls to it do not return.

    `delay_ms`: added to each sync. 0: the disk hangs. `calls`: those that do not return. SYNCS:
    writes still return, because they end in the page cache. Or ALL.
    """
    name = choose(stage, who, chance)
    how = f"{delay_ms} ms a sync" if delay_ms else f"hangs: {calls}"
    stage.say(f"the disk of {label(stage, name, who)}: {how}")
    kind = Kind.SLOW if delay_ms else Kind.HANG
    with stage.disk_faults.on(name, stage.data(name), kind, delay_ms=delay_ms, calls=calls):
        if not delay_ms:
            _until_met(stage, name)
        yield
    met = stage.disk_faults.met(name)
    stage.record("disk-well", node=name, met=met)
    stage.leader()
    stage.say(f"the disk of {name} is well")
    if met is None:
        raise NoEffect(f"{name} has not met the fault")


slow_disk = hanging_disk = Nemesis(_delay_disk)


@Nemesis
def disk_errors(
    stage: Stage, chance: random.Random, who: str = "follower", calls: str = Calls.SYNCS
) -> Iterator[None]:
    """Calls to a node's disk fail with EIO. The node ends, and starts again with a sound disk.

    It has to end with ExitCode.DISK.

    `calls`: SYNCS or WRITES.
    """
    name = choose(stage, who, chance)
    stage.say(f"the disk of {label(stage, name, who)} fails: EIO of its {calls}")
    word = stage.word_of(name)
    stage.away.add(name)
    stage.failing.add(name)
    with stage.disk_faults.on(name, stage.data(name), Kind.ERROR, calls=calls):
        _wait_ended(stage, name, f"{name} goes on")
        status = stage.cluster.exit_status(name)
        stage.record("disk-failed", **word, status=status)
        if status != ExitCode.DISK:
            stage.failures.append(f"{name} met EIO and ended with status {status}")
        yield
    revive(stage, name)


@Nemesis
def bad_sector(
    stage: Stage, chance: random.Random, who: str = "follower", part: str = file_damage.STATE
) -> Iterator[None]:
    """Reads of one file of a node fail with EIO. The node fetches its state again.

    The fault names the file by its inode. A second link to the file keeps the inode from being
    reused.

    `part`: LOG or STATE.
    """
    name = choose(stage, who, chance)
    held = stage.data(name).with_name(_BAD_SECTOR)
    stage.kill(name)
    if part == LOG:
        stage.archive.seal(name)
    path = file_damage.VICTIM[part](stage.data(name), chance)
    held.hardlink_to(path)
    stage.say(f"{name}'s {path.name} can't be read: EIO")
    unread = {"calls": Calls.READS, "inode": held.stat().st_ino}
    stage.damaged.add(name)
    stage.hurt.add(name)
    with stage.disk_faults.on(name, stage.data(name), Kind.ERROR, **unread):
        file_damage.heal(stage, name, first=lambda: _wait_replaced(stage, name, path, held))
    held.unlink()
    if stage.disk_faults.met(name) is None:
        raise NoEffect(f"{name} did not read its {path.name}")
    yield


@Nemesis
def torn_write(stage: Stage, chance: random.Random, who: str = "leader") -> Iterator[None]:
    """A node dies inside a write to its log while another is down, and has to count at its restart.

    The machine itself did not restart, so the log lost only the torn write and the node is sure of
    the rest (docs/adr/0039-tear-without-doubt.md). So three nodes have a majority with it.
    """
    name = choose(stage, who, chance)
    others = [each for each in survivors(stage) if each != name]
    if len(others) < stage.majority:
        raise NoEffect(f"without {' and '.join(sorted(stage.lost))} there is no majority left")
    absent = chance.choice(others)
    stage.say(f"{absent} is down; {label(stage, name, who)} dies inside a write")
    stage.kill(absent)
    stage.leader()
    word = stage.word_of(name)
    stage.away.add(name)
    with stage.disk_faults.on(name, stage.data(name), Kind.TEAR):
        _wait_ended(stage, name, f"{name} writes nothing")
    met = stage.disk_faults.met(name) or {}
    stage.record("kill", **word)
    torn = {key: met.get(key) for key in ("written", "wanted", "path")}
    stage.record("torn", node=name, absent=absent, torn=torn)
    began_s = time.monotonic()
    stage.restart(name)
    leader = stage.leader()
    stage.say(
        f"{met.get('written')} of {met.get('wanted')} bytes were written; without {absent},"
        f" {leader} leads {time.monotonic() - began_s:.2f} s after {name}'s start"
    )
    yield
    revive(stage, absent)


def _until_met(stage: Stage, name: str) -> None:
    """Return as soon as a call of a node has met its fault; NoEffect: none has, in time."""
    met = stage.disk_faults.met
    unmet = f"{name} has not met the fault"
    until(lambda: met(name) is not None, stage, name, MEETS_S, unmet, NoEffect)


def _wait_ended(stage: Stage, name: str, otherwise: str) -> None:
    """Return as soon as a node has ended; NoEffect: it has not, in time."""
    running = stage.cluster.is_running
    until(lambda: not running(name), stage, name, MEETS_S, otherwise, NoEffect)


def _wait_replaced(stage: Stage, name: str, path: Path, held: Path) -> None:
    """Return once a node has met the unreadable file and has replaced or deleted it.

    If the node does not meet the fault, return at once.
    """
    with contextlib.suppress(NoEffect):
        _until_met(stage, name)
    if stage.disk_faults.met(name) is None:
        return
    running, kept = stage.cluster.is_running, f"{name} has not replaced its {path.name}"
    until(lambda: not (running(name) and _is_same(path, held)), stage, name, READY_S, kept)


def _is_same(path: Path, held: Path) -> bool:
    try:
        return path.samefile(held)
    except FileNotFoundError:  # the node may delete it at any time
        return False
