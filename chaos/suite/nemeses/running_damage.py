"""Nemesis of a running node: files that it uses are damaged while it leads.

    damaged ──► it reads the file ──► it heals: new process, state and log fetched from the leader
            └─► it does not read it for RUNS_ON_S ──► killed; its next start finds the damage, heals

A leader has most of its work in memory, so it may lead on for long. Its answers are true all the
same, which the audit checks. One thing is wrong with the cluster meanwhile: no other strike at
nodes falls until the node is dead or heals.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from chaos.suite.nemeses.file_damage import FLIPPED, LOG, STATE, VICTIM, harm, heal, is_missed
from chaos.suite.nemeses.nemesis import Fizzled, Nemesis, chosen, said, until
from chaos.suite.stage.stage import READY_S, WHOLE_POLL_S, Stage
from timer.files import segment

RUNS_ON_S: Final = 8.0
"""A scrub begins every ten seconds, so some damage of state is found before, and some is not.
Nothing reads the end of the log before the next start."""
NOTICED: Final = "to be healed"
"""In the line of a node's log that says that it found damage."""
FETCHED: Final = "; fetching state and log from the leader"
"""In the line of the process that fetches them."""


@Nemesis
def hurt_running(
    stage: Stage, chance: random.Random, who: str = "leader", part: str = LOG, how: str = FLIPPED
) -> Iterator[None]:
    """A file of a node is damaged while it runs: it heals, at once or after its next start.

    The node is killed if it notices nothing.

    `part`: LOG: the segment that it appends to; STATE: any file that its manifest names, or that.
    `how`: FLIPPED: one bit; CUT: the second half is gone; REMOVED.
    """
    name = chosen(stage, who, chance)
    with contextlib.nullcontext() if part == STATE else stage.archive.sealed(name):
        _hurt(stage, name, who, VICTIM[part](stage.data(name), chance), how, chance)
    yield


def _hurt(stage: Stage, name: str, who: str, path: Path, how: str, chance: random.Random) -> None:
    since, word = stage.output(name).stat().st_size, stage.word_of(name)  # it may end at once
    with harm(path, how, chance, head=segment.HEADER_SIZE, inner=True) as file:
        stage.damaged.add(name)
        stage.hurt.add(name)
        stage.record("hurt-running", **word, file=path.name, how=how)
        stage.say(f"{said(stage, name, who)}, runs on with its {path.name} {how}")
        noticed = _notices(stage, name, since)
        if noticed:
            stage.say(f"{name} found the damage while it ran")
        else:
            stage.say(f"{name} ran on; kill -9, for its next start to find the damage")
            stage.kill(name)
            noticed = _says(stage, name, since, NOTICED)  # just before it died
        if noticed or is_missed(stage, name, path, file, ran=True):
            heal(stage, name, first=lambda: _until_fetching(stage, name, since))
            return
    heal(stage, name)
    raise Fizzled(f"{name} can do without its {path.name} as it was")


def _notices(stage: Stage, name: str, since: int) -> bool:
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


def _until_fetching(stage: Stage, name: str, since: int) -> None:
    """Return once a node fetches state and log anew.

    Raises:
        LaunchError: it does not, in time: it took what it has for whole.
    """
    fetches = partial(_says, stage, name, since, FETCHED)
    until(fetches, stage, name, READY_S, f"{name} does not fetch its state anew")


def _says(stage: Stage, name: str, since: int, text: str) -> bool:
    """Return whether a node's log has a text after its first `since` bytes."""
    with stage.output(name).open("rb") as file:
        file.seek(since)
        return text.encode() in file.read()
