"""Nemeses of files: truncated, flipped, removed, wiped, no room.

A node that finds a damaged or missing file fetches its state and log from the leader. It finds the
damage at its start, when it reads that part, or by its scrub. The scrub's first pass begins with
the process. The nemesis waits until the node is sound, because another loss of files may cost the
majority. The leader may die meanwhile and come back with all its files; the node has to heal all
the same. The archive keeps the old log as an earlier life. A node whose disk is full waits for
room, and the others serve. While a majority has too little room, requests are refused.

Files of a leader are damaged also while it leads:

    damaged ──► it reads the file ──► it heals: new process, state and log fetched from the leader
            └─► it does not read it for RUNS_ON_S ──► killed; its next start finds the damage, heals

A leader has most of its work in memory, so it may lead on for long. Its answers are true all the
same, which the audit checks. One thing is wrong with the cluster meanwhile: no other strike at
nodes falls until the node is dead or heals.
"""

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final

from chaos.suite.nemeses.nemesis import (
    POLL_S,
    Nemesis,
    NoEffect,
    choose,
    label,
    on_disks,
    revive,
    until,
    victims,
)
from chaos.suite.stage.stage import READY_S, WHOLE_POLL_S, Stage
from cluster.files.standby_ports import WAITING
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
FLIPPED: Final = "flipped"
CUT: Final = "cut"
REMOVED: Final = "removed"
RUNS_ON_S: Final = 8.0
"""A scrub begins every ten seconds, so some damage of state is found before, and some is not.
Nothing reads the end of the log before the next start."""
NOTICED: Final = "to be repaired"
"""In the line of a node's log that says that it found damage."""
FETCHED: Final = "; fetching state and log from the leader"
"""In the line of the process that fetches them."""
NOTICE_S: Final = 20.0
"""A node whose disk is full reports that within this, because every node writes all the time."""


@Nemesis
def damage(
    stage: Stage, chance: random.Random, who: str = "follower", part: str = LOG, how: str = FLIPPED
) -> Iterator[None]:
    """A file of a dead node is damaged.

    A node that gives up healing is lost for this run. If the node does not need the damaged
    part, the strike has no effect.

    `part`: LOG or STATE. `how`: FLIPPED: one bit in the middle half. CUT: the second half is gone.
    REMOVED.
    """
    name = choose(stage, who, chance)
    stage.kill(name)
    if part == LOG:
        stage.archive.seal(name)
    path = VICTIM[part](stage.data(name), chance)
    head = segment.HEADER_SIZE * (part == LOG)
    with harm(path, how, chance, head=head, inner=True) as file:
        stage.say(f"{name}'s {path.name} is {how}")
        if not is_missed(stage, name, path, file):
            raise NoEffect(f"{name} does not need the damaged part of {path.name}")
    stage.damaged.add(name)
    stage.hurt.add(name)
    heal(stage, name)
    yield


@Nemesis
def hurt_running(
    stage: Stage, chance: random.Random, who: str = "leader", part: str = LOG, how: str = FLIPPED
) -> Iterator[None]:
    """A file of a node is damaged while it runs: it heals, at once or after its next start.

    The node is killed if it notices nothing.

    `part`: LOG: the segment that it appends to; STATE: any file that its manifest names, or that.
    `how`: FLIPPED: one bit; CUT: the second half is gone; REMOVED.
    """
    name = choose(stage, who, chance)
    with contextlib.nullcontext() if part == STATE else stage.archive.sealed(name):
        _hurt(stage, name, who, VICTIM[part](stage.data(name), chance), how, chance)
    yield


def _hurt(stage: Stage, name: str, who: str, path: Path, how: str, chance: random.Random) -> None:
    since, word = stage.output(name).stat().st_size, stage.word_of(name)  # it may end at once
    with harm(path, how, chance, head=segment.HEADER_SIZE, inner=True) as file:
        stage.damaged.add(name)
        stage.hurt.add(name)
        stage.record("hurt-running", **word, file=path.name, how=how)
        stage.say(f"{label(stage, name, who)}, runs on with its {path.name} {how}")
        noticed = _finds(stage, name, since)
        if noticed:
            stage.say(f"{name} found the damage while it ran")
        else:
            stage.say(f"{name} ran on; kill -9, for its next start to find the damage")
            stage.kill(name)
            noticed = _says(stage, name, since, NOTICED)  # just before it died
        if noticed or is_missed(stage, name, path, file, ran=True):
            heal(stage, name, first=lambda: _wait_fetching(stage, name, since))
            return
    heal(stage, name)
    raise NoEffect(f"{name} can do without its {path.name} as it was")


def _finds(stage: Stage, name: str, since: int) -> bool:
    """Return whether a node finds the damage, or ends, within RUNS_ON_S."""
    deadline = time.monotonic() + RUNS_ON_S
    while time.monotonic() < deadline:
        if _says(stage, name, since, NOTICED):
            return True
        if not stage.cluster.is_running(name):
            if not stage.is_given_up(name):
                status = stage.cluster.exit_status(name)
                stage.failures.append(f"{name}, damaged, ended with status {status}")
            return True
        time.sleep(WHOLE_POLL_S)
    return False


def _wait_fetching(stage: Stage, name: str, since: int) -> None:
    """Return once a node fetches state and log again.

    Raises:
        LaunchError: it does not, in time: it took what it has for whole.
    """
    fetches = partial(_says, stage, name, since, FETCHED)
    until(fetches, stage, name, READY_S, f"{name} does not fetch its state again")


def _says(stage: Stage, name: str, since: int, text: str) -> bool:
    """Return whether a node's log has a text after its first `since` bytes."""
    with stage.output(name).open("rb") as file:
        file.seek(since)
        return text.encode() in file.read()


def harm(
    path: Path, how: str, chance: random.Random, *, head: int = 0, inner: bool = False
) -> FileIO:
    """Damage a file in its place, as a process may have it open, and return it open.

    `how`: FLIPPED (with `inner` in its middle half), CUT or REMOVED.

    Raises:
        NoEffect: the file does not exist, or has nothing behind its first `head` bytes.
    """
    try:
        file = path.open("r+b", buffering=0)
    except FileNotFoundError:
        raise NoEffect(f"there is no {path.name}") from None
    size = os.fstat(file.fileno()).st_size
    if size <= head:
        file.close()
        raise NoEffect(f"{path.name} holds nothing yet")
    if how == REMOVED:
        path.unlink(missing_ok=True)
    elif how == CUT:
        file.truncate(max(head, size // 2))
    else:
        at = chance.randrange(*(size // 4, -(-size * 3 // 4)) if inner else (0, size))
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ (1 << chance.randrange(8))]), at)
    return file


@on_disks
def fill(
    stage: Stage, chance: random.Random, who: str = "follower", leave: int = 0
) -> Iterator[None]:
    """Disks are full, or so nearly full that the cluster accepts no new timers.

    No effect if no node reports that.

    `leave`: free bytes left. 0: the node's next write fails; the node
    stops and waits for room.
    """
    names = victims(stage, who, chance)
    for name in names:
        left = f"{leave:,} bytes of room" if leave else "no room"
        stage.say(f"the disk of {label(stage, name, who)} has {left}")
        stage.disks[name].fill(leave)
    reports = {name: _notices(stage, name, waits=not leave) for name in names}
    for name, report in reports.items():
        noticed = report or f"unaware of its full disk: {stage.cluster.state(name)}"
        stage.record("full", node=name, leave=leave, noticed=noticed)
        stage.say(f"{name} is {noticed}")
    yield
    for name in names:
        stage.disks[name].drain()
    stage.cluster.start(*names, timeout_s=READY_S)
    stage.leader()
    has = "has" if len(names) == 1 else "have"
    stage.say(f"{' and '.join(names)} {has} room again")
    if not any(reports.values()):
        raise NoEffect(f"{' and '.join(names)} did not notice within {NOTICE_S:g} s")


def _notices(stage: Stage, name: str, *, waits: bool) -> str | None:
    """Return a node's own report that its disk is full or low; None: there is none in NOTICE_S.

    `waits`: the disk has no room at all, so the node has to report the role WAITING.
    """
    deadline = time.monotonic() + NOTICE_S
    while True:
        state = stage.cluster.state(name)
        if state and state.disk_low and (not waits or state.role == WAITING):
            return state.role if waits else f"low, as {state.role}"
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)


@Nemesis
def wipe(stage: Stage, chance: random.Random, who: str = "follower") -> Iterator[None]:
    """A node's disk is replaced by an empty one; a learner of the same name replaces the voter."""
    name = choose(stage, who, chance)
    stage.say(f"{name} loses its disk")
    stage.kill(name)
    with stage.archive.suspended():
        shutil.rmtree(stage.data(name))
    yield
    stage.cluster.format_learner(name)
    stage.launch(name)
    replace(stage, name)


def replace(stage: Stage, name: str) -> None:
    """Replace a node that runs by a new replica, as an operator does."""
    with stage.lend_turn(name):
        stage.change("replace", name)
        revive(stage, name)
        stage.wait_until_whole(name)


def heal(stage: Stage, name: str, first: Callable[[], object] | None = None) -> None:
    """Start a damaged node, call `first`, and wait until the node is whole or lost for good."""
    try:
        with stage.lend_turn(name):
            stage.restart(name)
            if first is not None:
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
    """Return the last segment of a dead node's log.

    Raises:
        NoEffect: no entry of the segment is known to be durable, so the node starts without it.
    """
    paths = segment.paths(RealDisk(), data / LOG)
    first = segment.first_of(paths[-1].name) if paths else None
    durable = read_mark(RealDisk(), data / LOG / MARK_NAME).durable
    if first is None or durable < first:
        raise NoEffect(f"the last segment of {data} has nothing durable yet")
    return paths[-1]


def _any_of_state(data: Path, chance: random.Random) -> Path:
    """Return the manifest of a dead node, or a file that it names.

    Raises:
        NoEffect: there is no manifest yet. The node makes one from its whole log.
    """
    paths = _named_files(data)
    if not paths:
        raise NoEffect(f"{data} has no manifest yet")
    # The folder first: else nearly every victim would be a run, of which there are many.
    folder = chance.choice(sorted({path.parent for path in paths}))
    return chance.choice([path for path in paths if path.parent == folder])


def _named_files(data: Path) -> list[Path]:
    """Return the manifest of a dead node and the files that it names; empty: it has none."""
    state = manifest.read(RealDisk(), data / STATE)
    names = [] if state is None else [manifest.NAME, *(n for n, _, _ in manifest.files(state))]
    return [data / STATE / name for name in names]


VICTIM: Final = {LOG: _last_segment, STATE: _any_of_state}


def is_missed(stage: Stage, name: str, path: Path, file: FileIO, *, ran: bool = False) -> bool:
    """Return whether a dead node's own `verify` finds the damage to a file, which `file` has open.

    Damage that it does not find is a failure of the run, with some exceptions. The log's last
    segment may have entries that are not known to be durable. A spill file may have bytes that the
    manifest does not need. A whole log restores a missing manifest. A node that `ran` with the
    damage may have retired the file or replaced it.
    """
    data = stage.data(name)
    found = verify(RealDisk(), state=data / STATE, log=data / LOG)
    if any(each.damage is not None for each in found):
        return True
    if path.exists():
        is_other = path.stat().st_ino != os.fstat(file.fileno()).st_ino
        in_part = path.parent.name in (LOG, manifest.SPILL_DIRECTORY)
        excused = in_part or is_other or path not in _named_files(data)
    else:
        excused = ran or path.name == manifest.NAME
    if not excused:
        stage.failures.append(f"{name} finds no damage, by its own verify: {path}")
    return False
