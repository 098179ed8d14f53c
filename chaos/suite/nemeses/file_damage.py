"""Nemeses of files: truncated, flipped, removed, wiped, no room.

A node that finds a damaged or missing file fetches its state and log from the leader. It finds the
damage when it starts, when it reads that part, or by its scrub, whose first pass begins with the
process. The nemesis waits until the node is sound, because a majority may not survive another loss
of files. It has to survive that the leader dies meanwhile and comes back with all its files. The
archive keeps the old log as another life. A node whose disk is full waits for room, and the others
go on. While a majority has too little room, requests are refused.
"""

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from chaos.suite.nemeses.nemesis import (
    DISKS,
    NOTHING,
    Fizzled,
    Undo,
    back,
    chosen,
    nothing,
    remaining,
    said,
)
from chaos.suite.stage.stage import Stage
from cluster.files.disk_room import WAITING
from deploy.local import LaunchError
from timer.files import segment
from timer.files.disk import RealDisk
from timer.files.log import MARK_NAME, read_mark
from timer.recovery import manifest
from timer.recovery.scrub import verify

LOG: Final = "log"
"""The last segment of a node's log, in the folder of that name."""
STATE: Final = "state"
"""Any file of its state: manifest, runs, key files, spill files."""
NOTICE_S: Final = 20.0
"""A node whose disk is full has to notice within this: it writes all the time."""


@dataclass(frozen=True, slots=True)
class TruncateFile:
    """The end of a file of a node is gone: of its log, more than it can take for a torn tail."""

    needs: ClassVar = NOTHING
    who: str = "follower"
    part: str = LOG
    """LOG or STATE."""
    share: float = 0.5
    """Of the file."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill it, truncate, start it."""

        def truncate(name: str, path: Path) -> None:
            whole = path.stat().st_size
            kept = segment.HEADER_SIZE if self.part == LOG else 0
            size = max(kept, int(whole * (1 - self.share)))
            if size >= whole:
                raise Fizzled(f"{name}'s {path.name} has nothing to lose")
            stage.say(f"{name}'s {path.name} ends {whole - size:,} bytes too early")
            os.truncate(path, size)

        return _damage(stage, self, chance, truncate)


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of a file of a node has changed."""

    needs: ClassVar = NOTHING
    who: str = "follower"
    part: str = LOG
    """LOG or STATE."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill it, flip a bit in the middle of the file, start it."""

        def flip(name: str, path: Path) -> None:
            size = path.stat().st_size
            if size <= segment.HEADER_SIZE and self.part == LOG:
                raise Fizzled(f"{name}'s {path.name} has nothing to change")
            at = chance.randrange(size // 4, size * 3 // 4)
            stage.say(f"byte {at} of {name}'s {path.name} is another")
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ (1 << chance.randrange(8))]))

        return _damage(stage, self, chance, flip)


@dataclass(frozen=True, slots=True)
class Remove:
    """A file of a node is gone."""

    needs: ClassVar = NOTHING
    who: str = "follower"
    part: str = LOG
    """LOG or STATE."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill it, remove the file, start it."""

        def remove(name: str, path: Path) -> None:
            stage.say(f"{name}'s {path.name} is gone")
            path.unlink()

        return _damage(stage, self, chance, remove)


@dataclass(frozen=True, slots=True)
class Fill:
    """Disks are full, or so nearly that nothing new is taken any more."""

    needs: ClassVar = DISKS
    who: str = "follower"
    """A role, or "all"."""
    leave: int = 0
    """Bytes. 0: whoever writes finds no room, ends and waits for it."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Fill them, and wait until their nodes have noticed; it had no effect if none has."""
        names = remaining(stage) if self.who == "all" else [chosen(stage, self.who, chance)]
        for name in names:
            left = f"{self.leave:,} bytes of room" if self.leave else "no room"
            stage.say(f"the disk of {said(stage, name, self.who)} has {left}")
            stage.disks[name].fill(self.leave)
        impressed = False
        for name in names:
            noticed = _notices(stage, name, waits=not self.leave)
            impressed |= noticed is not None
            noticed = noticed or f"not impressed: {stage.cluster.state(name)}"
            stage.record("full", node=name, leave=self.leave, noticed=noticed)
            stage.say(f"{name} is {noticed}")

        def undo() -> None:
            for name in names:
                stage.disks[name].drain()
            stage.await_ready(*names)
            stage.leader()
            has = "has" if len(names) == 1 else "have"
            stage.say(f"{' and '.join(names)} {has} room again")
            if not impressed:
                raise Fizzled(f"{' and '.join(names)} did not notice within {NOTICE_S:g} s")

        return undo


def _notices(stage: Stage, name: str, *, waits: bool) -> str | None:
    """Return what a node says of itself that has noticed that its disk was filled.

    None: it has not, within NOTICE_S.
    """
    deadline = time.monotonic() + NOTICE_S
    while True:
        state = stage.cluster.state(name)
        if state and state.disk_low and (not waits or state.role == WAITING):
            return state.role if waits else f"low, as {state.role}"
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Wipe:
    """A node's disk is replaced by an empty one; a learner takes its place under its name."""

    needs: ClassVar = NOTHING
    who: str = "follower"

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill it and remove its data."""
        name = chosen(stage, self.who, chance)
        stage.say(f"{name} loses its disk")
        stage.kill(name)
        with stage.archive.held():
            shutil.rmtree(stage.data(name))

        def undo() -> None:
            stage.cluster.format_learner(name)
            with stage.waiting_for(name):
                back(stage, name)
                stage.replace(name)
                stage.wait_until_whole(name)

        return undo


def _damage(
    stage: Stage,
    nemesis: TruncateFile | Flip | Remove,
    chance: random.Random,
    mutate: Callable[[str, Path], None],
) -> Undo:
    """Kill a node, have one of its files mutated, start it: it heals by itself.

    If it does not it is lost for this run. If nothing that it needs was mutated, it is just brought
    back.
    """
    name = chosen(stage, nemesis.who, chance)
    stage.kill(name)
    if nemesis.part == LOG:
        stage.archive.seal(name)
    try:
        path = VICTIM[nemesis.part](stage.data(name), chance)
        mutate(name, path)
        _check_missed(stage, name, path)
    except Fizzled:
        back(stage, name)
        raise
    stage.damaged.add(name)
    stage.hurt.add(name)
    heal(stage, name)
    return nothing


def heal(stage: Stage, name: str, first: Callable[[], object] = nothing) -> None:
    """Start a node that finds damage, do `first`, and wait until it is whole, or lost for good."""
    try:
        with stage.waiting_for(name):
            stage.restart(name)
            first()
            stage.wait_until_whole(name)
    except LaunchError:
        if not stage.is_given_up(name):
            raise
        stage.lose(name)
    else:
        stage.damaged.discard(name)
        stage.say(f"{name} is back and whole")


def _last_segment(data: Path, _: random.Random) -> Path:
    """Return the last segment of a dead node's log; all of it is needed, or none.

    Raises:
        Fizzled: a start can do without, for nothing in it is known to be durable.
    """
    paths = segment.paths(RealDisk(), data / LOG)
    first = segment.first_of(paths[-1].name) if paths else None
    durable = read_mark(RealDisk(), data / LOG / MARK_NAME).durable
    if first is None or durable < first:
        raise Fizzled(f"the last segment of {data} has nothing durable yet")
    return paths[-1]


def _any_of_state(data: Path, chance: random.Random) -> Path:
    """Return a file that a dead node's manifest needs, or that manifest.

    Raises:
        Fizzled: there is none that is missed: a whole log makes a manifest anew.
    """
    said = manifest.read(RealDisk(), data / STATE)
    if said is None:
        raise Fizzled(f"{data} has no manifest yet")
    names = [manifest.NAME] + [name for name, _, _ in manifest.files(said)]
    folder = chance.choice(sorted({Path(name).parent for name in names}))  # runs are many
    return data / STATE / chance.choice([name for name in names if Path(name).parent == folder])


VICTIM: Final = {LOG: _last_segment, STATE: _any_of_state}


def _check_missed(stage: Stage, name: str, path: Path) -> None:
    """Return if a dead node's own `verify` misses what was done away with.

    That it does not is a failure of the run; but of the log's end more may have been written than
    was known to be durable, of a spill file less be needed than is there, and all of a log makes a
    manifest anew.

    Raises:
        Fizzled: it does not.
    """
    data = stage.data(name)
    found = verify(RealDisk(), state=data / STATE, log=data / LOG)
    if any(each.damage is not None for each in found):
        return
    why = f"{name} can do without what {path.name} was"
    if path.exists():
        excused = path.parent.name in (LOG, manifest.SPILL_DIRECTORY)
    else:
        excused = path.name == manifest.NAME
    if not excused:
        stage.failures.append(f"{why}, by its own verify: {path}")
    raise Fizzled(why)
