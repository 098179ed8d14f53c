"""Nemeses of disks that fail: slow, hanging, with errors, unreadable in part, a write torn.

They reach a node through its own system calls (chaos/suite/stage/disk_faults.py), so they need
nothing of the machine. A fault that the node did not meet had no effect.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from chaos.suite.nemeses import file_damage
from chaos.suite.nemeses.file_damage import LOG
from chaos.suite.nemeses.nemesis import (
    NOTHING,
    Fizzled,
    Undo,
    back,
    chosen,
    nothing,
    remaining,
    said,
)
from chaos.suite.stage.disk_faults import Calls, Kind
from chaos.suite.stage.stage import READY_S, Stage
from cluster.settings.exit_codes import EXIT_DISK
from deploy.local import LaunchError

MEETS_S: Final = 20.0
"""A node has to meet its disk's fault within this: each of them writes all the time."""
POLL_S: Final = 0.02
_BAD_SECTOR: Final = "bad-sector"


@dataclass(frozen=True, slots=True)
class SlowDisk:
    """Every sync of a node's disk takes longer."""

    needs: ClassVar = NOTHING
    who: str = "leader"
    delay_ms: int = 300

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Make it slow."""
        name = chosen(stage, self.who, chance)
        stage.say(f"the disk of {said(stage, name, self.who)}: {self.delay_ms} ms a sync")
        stage.disk_faults.set(name, stage.data(name), Kind.SLOW, delay_ms=self.delay_ms)
        return partial(_well, stage, name)


@dataclass(frozen=True, slots=True)
class HangingDisk:
    """Calls to a node's disk do not return."""

    needs: ClassVar = NOTHING
    who: str = "leader"
    calls: str = Calls.SYNCS
    """SYNCS: writes end in the page cache; or ALL."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Let it hang, and wait until the node has met that."""
        name = chosen(stage, self.who, chance)
        stage.say(f"the disk of {said(stage, name, self.who)} hangs: {self.calls}")
        stage.disk_faults.set(name, stage.data(name), Kind.HANG, calls=Calls(self.calls))
        with _undone_if_it_fails(partial(_well, stage, name)) as undo:
            _until_met(stage, name)
        return undo


@dataclass(frozen=True, slots=True)
class DiskErrors:
    """Calls to a node's disk fail with EIO: the node ends, and starts again when it is well."""

    needs: ClassVar = NOTHING
    who: str = "follower"
    calls: str = Calls.SYNCS
    """SYNCS or WRITES."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Let them fail, and wait until the node has ended because of that."""
        name = chosen(stage, self.who, chance)
        stage.say(f"the disk of {said(stage, name, self.who)} fails: EIO of its {self.calls}")
        word = stage.word_of(name)
        stage.away.add(name)
        stage.failing.add(name)
        stage.disk_faults.set(name, stage.data(name), Kind.ERROR, calls=Calls(self.calls))

        def undo() -> None:
            stage.disk_faults.end(name)
            back(stage, name)

        with _undone_if_it_fails(undo):
            _until(lambda: not stage.cluster.is_running(name), MEETS_S, f"{name} goes on")
        status = stage.cluster.exit_status(name)
        stage.record("disk-failed", **word, status=status)
        if status != EXIT_DISK:
            stage.failures.append(f"{name} met EIO, and ended with status {status}")
        return undo


@dataclass(frozen=True, slots=True)
class BadSector:
    """A file of a node can't be read: EIO. The node fetches its state anew."""

    needs: ClassVar = NOTHING
    who: str = "follower"
    part: str = file_damage.STATE
    """LOG or STATE."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill it, make a file unreadable, start it; wait until it has other files, and is whole.

        A second name of the file keeps its inode from being given to another file.
        """
        name = chosen(stage, self.who, chance)
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
        return nothing


@dataclass(frozen=True, slots=True)
class TornWrite:
    """A node dies inside a write to its log while another is down: the rest has to serve with it.

    That is so from three nodes on, as the machine has run on (docs/adr/0039-tear-without-doubt.md).
    """

    needs: ClassVar = NOTHING
    who: str = "leader"

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill one, tear the other's write; start the torn one, and wait for a leader."""
        name = chosen(stage, self.who, chance)
        others = [each for each in remaining(stage) if each != name]
        if len(others) < stage.majority:
            raise Fizzled(f"without {' and '.join(sorted(stage.lost))} there is no majority left")
        absent = chance.choice(others)
        stage.say(f"{absent} is down; {said(stage, name, self.who)} dies inside a write")
        stage.kill(absent)
        undo = partial(back, stage, absent)
        with _undone_if_it_fails(undo):
            stage.leader()
            word = stage.word_of(name)
            stage.away.add(name)
            stage.disk_faults.set(name, stage.data(name), Kind.TEAR)
            try:
                _until(
                    lambda: not stage.cluster.is_running(name), MEETS_S, f"{name} writes nothing"
                )
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
        return undo


def _until(condition: Callable[[], bool], within_s: float, otherwise: str) -> None:
    """Return as soon as it holds.

    Raises:
        Fizzled: it does not, in time; says `otherwise`.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise Fizzled(f"{otherwise}, after {within_s:g} s")
        time.sleep(POLL_S)


def _until_met(stage: Stage, name: str) -> None:
    _until(lambda: stage.disk_faults.met(name) is not None, MEETS_S, f"{name} has not met it")


@contextlib.contextmanager
def _undone_if_it_fails(undo: Undo) -> Iterator[Undo]:
    """A strike that fails half way, or had no effect, leaves the cluster whole."""
    try:
        yield undo
    except BaseException:
        undo()
        raise


def _well(stage: Stage, name: str) -> None:
    stage.disk_faults.end(name)
    met = stage.disk_faults.met(name)
    stage.record("disk-well", node=name, met=met)
    stage.leader()
    stage.say(f"the disk of {name} is well")
    if met is None:
        raise Fizzled(f"{name} has not met it")


def _replaced(stage: Stage, name: str, path: Path, held: Path) -> None:
    """Return once a node has met that a file can't be read, and has another in its place, or none.

    If it does not meet it there is nothing to wait for.
    """
    with contextlib.suppress(Fizzled):
        _until_met(stage, name)
    if stage.disk_faults.met(name) is None:
        return
    deadline = time.monotonic() + READY_S
    while stage.cluster.is_running(name) and _is_same(path, held):
        if time.monotonic() > deadline:
            raise LaunchError(f"{name} has not replaced its {path.name} within {READY_S:g} s")
        time.sleep(POLL_S)


def _is_same(path: Path, held: Path) -> bool:
    try:
        return path.samefile(held)
    except FileNotFoundError:  # it may go at any time
        return False
