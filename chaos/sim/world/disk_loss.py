"""What takes a voter's disk away for good, in a minority of the voters, and what must hold then.

    flip      one bit of what was synced turns, or no read sees its page any more, under the running
              process or just before a restart
    shorten   a file that was synced has lost its end
    wipe      the disk was replaced by an empty one
    forget    promise, log and state are gone; the identity is there

A damaged replica may go on as long as it does not need what is damaged. When it does, it says
which file (and, inside of one, which byte), fetches state and log anew from a leader, and has to be
up to date in the end like everybody. Who has lost its promise or its identity stays down, and a
wiped one does not come back as the voter that it was: a new replica takes its place. What remains
must go on with nothing lost, unless so many of the rest are unsure that without the lost one's word
nobody may lead: such a world *waits for repair*, and that it does nothing wrong meanwhile is all
that is asked of it.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chaos.sim.world.paths import LOG_PATH, PROMISE_PATH, STATE_PATH
from chaos.sim.world.referee import Broken
from replication.core.progress import in_force
from replication.core.quorum import Voters, granted
from timer.model.timer_errors import StorageError, WrongDirectoryError

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode
    from chaos.sim.world.world import World

ROOT: Final = Path("/")
SPOILT: Final = 0.3
"""Of flips."""


def may_damage(world: "World", node: "SimNode") -> bool:
    """Return whether `node`, a voter, can lose its disk with a majority of the others whole."""
    voters = world.voters_now()
    broken = {each.replica for each in world.nodes if each.damage or each.lied} & voters
    most = (min(len(each) for each in _sets(world)) - 1) // 2
    return node.replica in voters and len(broken | {node.replica}) <= most


def flip(node: "SimNode", rng: random.Random) -> bool:
    """Turn one bit of what is synced, or spoil its page; return whether there was any."""
    hurt = node.disk.spoil_synced if rng.random() < SPOILT else node.disk.flip_synced
    found = hurt(rng, ROOT)
    if found is not None:
        node.damage += node.disk.names_of(found[0])
    return found is not None


def shorten(node: "SimNode", rng: random.Random) -> bool:
    """Cut a synced file of a dead node; return whether there was one."""
    found = node.disk.shorten_synced(rng, ROOT)
    if found is not None:
        node.damage += node.disk.names_of(found[0])
    return found is not None


def wipe(node: "SimNode") -> None:
    """Empty the disk of a dead node."""
    node.disk.wipe()
    node.damage.append(ROOT)


def forget(node: "SimNode") -> None:
    """Take from the disk of a dead node all that it remembers, except who it is."""
    gone = (PROMISE_PATH, LOG_PATH, STATE_PATH)
    node.disk.lose(gone)
    node.damage += gone


def check_refusal(node: "SimNode", error: StorageError) -> None:
    """Check that a node that refuses to go on has a reason, and names it.

    Raises:
        Broken: nothing was done to its disk, or the error does not say where.
    """
    if not node.damage:
        raise Broken("storage", f"node {node.replica}: {error}") from error
    if isinstance(error, WrongDirectoryError) != (ROOT in node.damage):
        raise Broken("storage", f"node {node.replica}, damaged at {node.damage}: {error}")
    places = {str(place) for path in node.damage for place in (path, path.parent)} - {"/"}
    places |= {path.name for path in node.damage if path.suffix}  # a crash may bring a name back
    if ROOT not in node.damage and not any(place in str(error) for place in places):
        raise Broken("storage", f"node {node.replica}, damaged at {node.damage}: {error}")


def waits_for_repair(world: "World") -> bool:
    """Return whether nobody may lead before a lost voter is repaired."""
    sure = {n.replica for n in world.nodes if n.alive and not n.damage and not n.core.unsure}
    lost = {each.replica for each in world.nodes if each.damage}
    cores = [node.core for node in world.nodes if node.alive]
    known = [core.shape.sets_from(core.commit_index) for core in cores]
    sets = in_force(known) if known else (world.voters,)
    return any(lost & voters and not granted([voters], sure) for voters in sets)


def _sets(world: "World") -> "set[Voters]":
    """Return the voter sets that somebody counts majorities of."""
    cores = [node.core for node in world.nodes if node.alive]
    return {each for core in cores for each in core._sets} or {world.voters}  # noqa: SLF001
