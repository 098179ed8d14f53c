"""Nemeses of files: truncated, flipped, wiped, no room.

A node that finds a damaged file, or none, fetches what it lacks from the leader. Until it has it, a
majority may not stand another loss, so it is waited for. What its log held before is another life
in the archive. A node whose disk is full exits (67) and the others go on.
"""

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from chaos.suite.nemesis import DISKS, NOTHING, Undo, back, chosen, nothing
from chaos.suite.stage import Stage
from deploy.local import LaunchError
from timer import segment

EXIT_S: Final = 20.0
"""A node whose disk is full has to end within this: it writes all the time."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """The end of a node's log is gone: more than it can take for a torn tail."""

    needs: ClassVar = NOTHING
    who: str = "follower"
    share: float = 0.5
    """Of the last segment."""

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill it, truncate, start it."""
        name = chosen(stage, self.who, chance)
        stage.kill(name)
        stage.archive.seal(name)
        path = _last_segment(stage, name)
        whole = path.stat().st_size
        size = max(segment.HEADER_SIZE, int(whole * (1 - self.share)))
        stage.say(f"{name}'s log ends {whole - size:,} bytes too early")
        with path.open("r+b") as file:
            file.truncate(size)
        _start_damaged(stage, name)
        return nothing


@dataclass(frozen=True, slots=True)
class Flip:
    """One byte of a node's log has changed."""

    needs: ClassVar = NOTHING
    who: str = "follower"

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Kill it, flip a byte of the last segment, start it."""
        name = chosen(stage, self.who, chance)
        stage.kill(name)
        stage.archive.seal(name)
        path = _last_segment(stage, name)
        size = path.stat().st_size
        at = chance.randrange(size // 4, size * 3 // 4)
        stage.say(f"byte {at} of {name}'s {path.name} is another")
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << chance.randrange(8))]))
        _start_damaged(stage, name)
        return nothing


@dataclass(frozen=True, slots=True)
class Fill:
    """A node's disk is full."""

    needs: ClassVar = DISKS
    who: str = "follower"

    def strike(self, stage: Stage, chance: random.Random) -> Undo:
        """Fill it, and wait until the node has noticed."""
        name = chosen(stage, self.who, chance)
        stage.say(f"the disk of {name} is full")
        stage.away.add(name)
        stage.disks[name].fill()
        deadline = time.monotonic() + EXIT_S
        while stage.cluster.is_running(name) and time.monotonic() < deadline:
            time.sleep(0.05)
        status = stage.cluster.exit_status(name)
        stage.record("full", node=name, status=status)
        ended = "still runs" if status is None else f"ended with exit status {status}"
        stage.say(f"{name} {ended}")

        def undo() -> None:
            stage.disks[name].drain()
            back(stage, name)

        return undo


@dataclass(frozen=True, slots=True)
class Wipe:
    """A node's disk is replaced by an empty one; it is formatted anew under its name."""

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
            back(stage, name)
            stage.wait_until_whole(name)

        return undo


def _last_segment(stage: Stage, name: str) -> Path:
    log = stage.data(name) / "log"
    return max(path for path in log.iterdir() if segment.first_of(path.name) is not None)


def _start_damaged(stage: Stage, name: str) -> None:
    """Start a damaged node; it heals by itself. If it does not it is lost for this run."""
    stage.damaged.add(name)
    try:
        stage.restart(name)
    except LaunchError:
        stage.lose(name)
    else:
        stage.wait_until_whole(name)
        stage.damaged.discard(name)
        stage.say(f"{name} is back and whole")
