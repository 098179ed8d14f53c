"""Nemeses of voters: promise, identity and Raft files damaged, members changed in a partition.

A node whose promise or identity is damaged waits until an operator replaces it. The nemesis acts as
that operator (docs/members.md). A node replaces damaged Raft files, and its Raft votes count
again once the others have filled the files (docs/adr/0043-rafts-files-are-a-hint.md).
"""

import contextlib
import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from chaos.suite.nemeses.file_damage import FLIPPED, harm, replace
from chaos.suite.nemeses.links import links
from chaos.suite.nemeses.nemesis import (
    ALL,
    Nemesis,
    NoEffect,
    choose,
    label,
    on_network,
    revive,
    until,
    victims,
)
from chaos.suite.stage.stage import READY_S, Stage
from cluster.control.raft_journal import read_meta
from cluster.files.replacement import REPLACEABLE
from timer.files.data_directory import PROMISE_NAME
from timer.model.timer_errors import StorageError
from timerclient import TimerClient
from timerclient.values.errors import TimerError

RAFT: Final = "raft"
"""The folder of Raft's files, all of them."""


@Nemesis
def forget(
    stage: Stage, chance: random.Random, who: str = "follower", file: str = PROMISE_NAME,
    how: str = FLIPPED, runs_on_s: float = 0.0,
) -> Iterator[None]:  # fmt: skip
    """The promise or the identity of a node is damaged; a new replica replaces the node.

    `file`: `promise` or `identity.json`. `how`: FLIPPED or CUT; for the promise also REMOVED.
    `runs_on_s`: seconds that the node runs on with the damage. 0: it is killed before the damage.
    """
    name = choose(stage, who, chance)
    path = stage.data(name) / file
    if not runs_on_s:
        stage.kill(name)
    stage.say(f"{name}'s {file}: {how}")
    harm(path, how, chance).close()
    stage.hurt.add(name)
    if runs_on_s:
        harmed = _content(path)
        stage.record("hurt-running", **stage.word_of(name), file=file, how=how)
        time.sleep(runs_on_s)
        stage.kill(name)
        if _content(path) != harmed:
            raise NoEffect(f"{name} wrote its {file} again before it died")
    stage.archive.update()  # a replaced node deletes its log itself
    stage.launch(name)

    def waits() -> bool:
        return (state := stage.cluster.state(name)) is not None and state.role == REPLACEABLE

    until(waits, stage, name, READY_S, f"{name} does not wait to be replaced")
    stage.record("replaceable", node=name, file=file, how=how)
    stage.say(f"{name} is {REPLACEABLE}")
    yield
    replace(stage, name)
    stage.say(f"{name} is a new replica, and whole")


@Nemesis
def hurt_raft(
    stage: Stage, chance: random.Random, who: str = "follower", file: str = "raft/journal",
    how: str = FLIPPED,
) -> Iterator[None]:  # fmt: skip
    """Raft files of a node are damaged or gone; the node creates new ones.

    The files of all nodes may be lost at once, while none runs. No node then has the former
    register. The log has epochs and voters, and the promises are there: the next epoch is above.

    The undo waits until the Raft votes count again.

    `file`: a path below the data directory. RAFT: the whole folder. `how`: FLIPPED, CUT or REMOVED.
    The folder can only be REMOVED.
    """
    names = victims(stage, who, chance)
    if who == ALL and stage.lost:  # `timerd --raft-lost` is for that
        raise NoEffect(f"without {' and '.join(sorted(stage.lost))} no vote would ever count")
    stage.kill(*names)
    for path in [stage.data(name) / file for name in names]:
        shutil.rmtree(path) if path.is_dir() else harm(path, how, chance).close()
    whose = "all nodes'" if who == ALL else f"{names[0]}'s"
    stage.say(f"{whose} {file}: {how}")
    stage.hurt.update(names)
    yield
    # Others strike while one node is waited for; nothing else may be wrong beside all.
    with stage.lend_turn(names[0]) if who != ALL else contextlib.nullcontext():
        revive(stage, *names)
        began_s = time.monotonic()
        for name in names:
            may_vote = partial(_may_vote, stage.data(name) / RAFT / "meta")
            until(may_vote, stage, name, READY_S, f"{name}'s Raft votes do not count")
            stage.wait_until_whole(name)
    took_s = round(time.monotonic() - began_s, 2)
    for name in names:
        stage.record("raft-votes", node=name, file=file, how=how, took_s=took_s)
    stage.say(f"Raft votes of {' and '.join(names)} count, {took_s:g} s later")


@on_network
def remove_cut_off(stage: Stage, chance: random.Random, who: str = "follower") -> Iterator[None]:
    """A voter that is cut off from the others is removed; it is added again after the partition."""
    name = choose(stage, who, chance)
    state = stage.cluster.state(name)
    stage.say(f"cut off {label(stage, name, who)}, and remove it")
    try:
        with stage.network.cut(links(stage, name)):
            if state is not None and state.role == "leader":
                stage.leader(above_epoch=state.epoch)
            stage.change("remove", name)
            stage.record("removed", node=name)
            stage.say(f"{name} is no voter any more")
            yield
    finally:
        stage.change("add", name)
        stage.record("added", node=name)
        stage.wait_until_whole(name)
        stage.say(f"{name} votes again")


@on_network
def replace_cut_off(stage: Stage, chance: random.Random, who: str = "follower") -> Iterator[None]:
    """`members replace` of a node that lost its disk, while its link to the leader is cut.

    The change is refused until the link is whole. The node still reaches the third node, and only
    the leader can send it the log.
    """
    leader = choose(stage, "leader", chance)
    name = choose(stage, who, chance)
    if name == leader:
        raise NoEffect(f"{name} leads: it can't be cut off from itself")
    stage.say(f"{name} loses its disk; its link to {leader}, the leader, is cut")
    stage.kill(name)
    with stage.archive.suspended():
        shutil.rmtree(stage.data(name))
    stage.cluster.format_learner(name)
    with stage.network.cut(links(stage, name, leader)):
        stage.launch(name)
        answer = "made"
        with TimerClient(stage.cluster.endpoints) as client:
            try:
                client.change_members("replace", name)
            except TimerError as error:
                answer = str(error)
        stage.record("replace-asked", node=name, leader=leader, answer=answer)
        stage.say(f"replace {name}: {answer}")
        yield
    replace(stage, name)
    stage.say(f"{name} votes in place of its earlier replica")


def _content(path: Path) -> bytes:
    """Return the bytes of a file; none if there is no such file."""
    return path.read_bytes() if path.exists() else b""


def _may_vote(meta: Path) -> bool:
    with contextlib.suppress(StorageError):  # the node may be writing the file
        return read_meta(meta)[2]
    return False
