"""Nemeses of files: truncated, flipped, removed, wiped, no room.

A node that finds a damaged file, or none, fetches what it lacks from the leader. It finds it when
it starts, when it reads that part, or by its scrub, whose first pass begins with the process. Until
all is sound, a majority may not stand another loss, so it is waited for. What its log held before
is another life in the archive. A node whose disk is full waits for room, and the others go on;
while a majority has too little, nothing new is taken.
"""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from chaos.suite.nemesis import (
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
from chaos.suite.stage import Stage
from cluster.space import WAITING
from deploy.local import LaunchError
from timer import segment
from timer.disk import RealDisk
from timer.scrub import Checked, verify

LOG: Final = "log"
"""The last segment of a node's log, in the folder of that name."""
STATE: Final = "state"
"""Any file of its state: manifest, runs, key files, spill files."""
NOTICE_S: Final = 20.0
"""A node whose disk is full has to notice within this: it writes all the time."""


@dataclass(frozen=True, slots=True)
class Truncate:
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
            size = max(segment.HEADER_SIZE, int(whole * (1 - self.share)))
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
            back(stage, name)
            stage.replace(name)
            stage.wait_until_whole(name)

        return undo


def _damage(
    stage: Stage,
    nemesis: Truncate | Flip | Remove,
    chance: random.Random,
    mutate: Callable[[str, Path], None],
) -> Undo:
    """Kill a node, have one of its files mutated, start it: it heals by itself.

    If it does not it is lost for this run. If nothing that it needs was mutated, it is just brought
    back.
    """
    name = chosen(stage, nemesis.who, chance)
    stage.kill(name)
    stage.archive.seal(name)
    try:
        path = _victim(stage, name, nemesis.part, chance)
        mutate(name, path)
        _check_needed(stage, name, path)
    except Fizzled:
        back(stage, name)
        raise
    stage.damaged.add(name)
    stage.hurt.add(name)
    try:
        stage.restart(name)
    except LaunchError:
        if not stage.is_given_up(name):
            raise
        stage.lose(name)
    else:
        stage.wait_until_whole(name)
        stage.damaged.discard(name)
        stage.say(f"{name} is back and whole")
    return nothing


def _victim(stage: Stage, name: str, part: str, chance: random.Random) -> Path:
    """Return the last segment of a dead node's log, or any file that its manifest needs, or it.

    Raises:
        Fizzled: it has no state yet.
    """
    data = stage.data(name)
    if part == LOG:
        return max(p for p in (data / LOG).iterdir() if segment.first_of(p.name) is not None)
    paths = [each.path for each in _files(stage, name) if each.path.is_relative_to(data / STATE)]
    if not paths:
        raise Fizzled(f"{name} has no manifest yet")
    folder = chance.choice(sorted({path.parent for path in paths}))  # runs outnumber the manifest
    return chance.choice(sorted(path for path in paths if path.parent == folder))


def _files(stage: Stage, name: str) -> Iterator[Checked]:
    """Yield what a dead node's own `verify` says of each file of state and log."""
    data = stage.data(name)
    return verify(RealDisk(), state=data / STATE, log=data / LOG)


def _check_needed(stage: Stage, name: str, path: Path) -> None:
    """Return if a dead node lacks what was done away with.

    Raises:
        Fizzled: it can do without; as without a manifest, while its log begins at 1.
    """
    if not any(each.damage is not None for each in _files(stage, name)):
        raise Fizzled(f"{name} can do without what {path.name} was")
