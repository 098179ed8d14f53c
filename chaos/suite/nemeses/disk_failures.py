"""Nemeses of disks that fail: slow, hanging, with errors, unreadable in part, a write torn.

They change the results of the node's own system calls (chaos/suite/stage/disk_faults.py), so they
work on every machine. A fault that none of these calls met had no effect.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chaos.suite.nemeses import file_damage
from chaos.suite.nemeses.file_damage import LOG
from chaos.suite.nemeses.nemesis import (
    Fizzled,
    NodeNemesis,
    back,
    remaining,
    said,
    until,
)
from chaos.suite.stage.disk_faults import Calls, Kind
from chaos.suite.stage.stage import READY_S, Stage
from cluster.settings.exit_codes import EXIT_DISK

MEETS_S: Final = 20.0
"""A node's calls meet a fault of its disk within this, because every node writes all the time."""
_BAD_SECTOR: Final = "bad-sector"


@dataclass(frozen=True, slots=True)
class SlowDisk(NodeNemesis):
    """Every sync of a node's disk takes longer."""

    delay_ms: int = 300
    """Added to each sync."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        name = self.victim(stage, chance)
        stage.say(f"the disk of {said(stage, name, self.who)}: {self.delay_ms} ms a sync")
        stage.disk_faults.set(name, stage.data(name), Kind.SLOW, delay_ms=self.delay_ms)
        yield
        _well(stage, name)


@dataclass(frozen=True, slots=True)
class HangingDisk(NodeNemesis):
    """Calls to a node's disk do not return."""

    calls: str = Calls.SYNCS
    """SYNCS: writes still return, because they end in the page cache. Or ALL."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        """Let the disk hang, and wait until a call of the node has met the fault."""
        name = self.victim(stage, chance)
        stage.say(f"the disk of {said(stage, name, self.who)} hangs: {self.calls}")
        stage.disk_faults.set(name, stage.data(name), Kind.HANG, calls=Calls(self.calls))
        try:
            _until_met(stage, name)
            yield
        finally:
            _well(stage, name)


@dataclass(frozen=True, slots=True)
class DiskErrors(NodeNemesis):
    """Calls to a node's disk fail with EIO. The node ends, and starts again with a sound disk."""

    who: str = "follower"
    calls: str = Calls.SYNCS
    """SYNCS or WRITES."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        """Let the calls fail, and wait until the node has ended; it has to end with EXIT_DISK."""
        name = self.victim(stage, chance)
        stage.say(f"the disk of {said(stage, name, self.who)} fails: EIO of its {self.calls}")
        word = stage.word_of(name)
        stage.away.add(name)
        stage.failing.add(name)
        stage.disk_faults.set(name, stage.data(name), Kind.ERROR, calls=Calls(self.calls))
        try:
            _until_ended(stage, name, f"{name} goes on")
            status = stage.cluster.exit_status(name)
            stage.record("disk-failed", **word, status=status)
            if status != EXIT_DISK:
                stage.failures.append(f"{name} met EIO and ended with status {status}")
            yield
        finally:
            stage.disk_faults.end(name)
            back(stage, name)


@dataclass(frozen=True, slots=True)
class BadSector(NodeNemesis):
    """Reads of one file of a node fail with EIO. The node fetches its state anew."""

    who: str = "follower"
    part: str = file_damage.STATE
    """LOG or STATE."""

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        """Kill a node, make a file unreadable, start the node, and wait until it is whole.

        The fault names the file by its inode. A second link to the file keeps the inode from being
        reused.
        """
        name = self.victim(stage, chance)
        held = stage.data(name).with_name(_BAD_SECTOR)
        stage.kill(name)
        if self.part == LOG:
            stage.archive.seal(name)
        try:
            path = file_damage.VICTIM[self.part](stage.data(name), chance)
        except Fizzled:
            back(stage, name)
            raise
        held.hardlink_to(path)
        stage.say(f"{name}'s {path.name} can't be read: EIO")
        inode = held.stat().st_ino
        stage.disk_faults.set(name, stage.data(name), Kind.UNREAD, inode=inode)
        stage.damaged.add(name)
        stage.hurt.add(name)
        try:
            file_damage.heal(stage, name, first=lambda: _replaced(stage, name, path, held))
        finally:
            stage.disk_faults.end(name)
            held.unlink()
        if stage.disk_faults.met(name) is None:
            raise Fizzled(f"{name} did not read its {path.name}")
        yield


@dataclass(frozen=True, slots=True)
class TornWrite(NodeNemesis):
    """A node dies inside a write to its log while another is down, and has to count at its restart.

    The machine itself did not restart, so the log lost only the torn write and the node is sure of
    the rest (docs/adr/0039-tear-without-doubt.md). So three nodes have a majority with it.
    """

    def fault(self, stage: Stage, chance: random.Random) -> Iterator[None]:
        """Kill one node, tear a write of another, start the torn node, and wait for a leader."""
        name = self.victim(stage, chance)
        others = [each for each in remaining(stage) if each != name]
        if len(others) < stage.majority:
            raise Fizzled(f"without {' and '.join(sorted(stage.lost))} there is no majority left")
        absent = chance.choice(others)
        stage.say(f"{absent} is down; {said(stage, name, self.who)} dies inside a write")
        stage.kill(absent)
        try:
            stage.leader()
            word = stage.word_of(name)
            stage.away.add(name)
            stage.disk_faults.set(name, stage.data(name), Kind.TEAR)
            try:
                _until_ended(stage, name, f"{name} writes nothing")
            finally:
                stage.disk_faults.end(name)
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
        finally:
            back(stage, absent)


def _until_met(stage: Stage, name: str) -> None:
    """Return as soon as a call of a node has met its fault; Fizzled: none has, in time."""
    met = stage.disk_faults.met
    unmet = f"{name} has not met the fault"
    until(lambda: met(name) is not None, stage, name, MEETS_S, unmet, Fizzled)


def _until_ended(stage: Stage, name: str, otherwise: str) -> None:
    """Return as soon as a node has ended; Fizzled: it has not, in time."""
    running = stage.cluster.is_running
    until(lambda: not running(name), stage, name, MEETS_S, otherwise, Fizzled)


def _well(stage: Stage, name: str) -> None:
    stage.disk_faults.end(name)
    met = stage.disk_faults.met(name)
    stage.record("disk-well", node=name, met=met)
    stage.leader()
    stage.say(f"the disk of {name} is well")
    if met is None:
        raise Fizzled(f"{name} has not met the fault")


def _replaced(stage: Stage, name: str, path: Path, held: Path) -> None:
    """Return once a node has met the unreadable file and has replaced or deleted it.

    If the node does not meet the fault, return at once.
    """
    with contextlib.suppress(Fizzled):
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
