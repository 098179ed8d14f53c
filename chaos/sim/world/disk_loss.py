"""Permanent damage to the disks of a minority of the voters, and the rules that must hold then.

    flip      one bit of synced data changes, or its page can't be read any more; the process is
              running or restarts just after
    shorten   a synced file has lost its end
    wipe      an empty disk replaces the disk
    forget    promise, log and state are gone; the identity is still there

A damaged replica may run as long as it does not read the damaged data. When it reads them, its
error names the file, and the byte for damage inside of a file. The replica then fetches state and
log from a leader, and must be up to date in the end like all others.

A replica that lost its promise or its identity stays down. A wiped replica does not return as the
voter that it was: a new replica takes its place. The other replicas must continue and lose nothing.

There is one exception. The other replicas may be unsure in such number that no leader is possible
without the lost replica's promise. Such a world *waits for repair*. Only the rules of safety are
checked in it.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chaos.sim.world.referee import Broken
from chaos.sim.world.simdisk import LOG_PATH, PROMISE_PATH, STATE_PATH
from replication.core.progress import in_force
from replication.core.quorum import Voters, is_granted
from timer.model.timer_errors import StorageError, WrongDirectoryError

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode
    from chaos.sim.world.world import World

ROOT: Final = Path("/")
SPOILT: Final = 0.3
"""Share of flips that make a page unreadable."""


def may_damage(world: "World", node: "SimNode") -> bool:
    """Return whether `node` is a voter and its damage leaves a majority of voters undamaged."""
    sets = _sets(world)
    voters = world.control.voters.union(*sets)
    broken = {each.replica for each in world.nodes if each.damage or each.lied} & voters
    most = (min(len(each) for each in sets) - 1) // 2
    return node.replica in voters and len(broken | {node.replica}) <= most


def hurt(node: "SimNode", rng: random.Random, *, shortens: bool = False) -> bool:
    """Flip one bit of synced data, or make its page unreadable; return whether there were any.

    `shortens`: cut the file there instead, on the disk of a dead node.
    """
    disk, spoils = node.disk, not shortens and rng.random() < SPOILT
    place = disk.synced_byte(rng, ROOT)
    if place is None:
        return False
    if shortens:
        disk.shorten(*place)
    elif spoils:
        disk.spoil(*place)
    else:
        disk.flip(*place, mask=1 << rng.randrange(8))
    node.damage += disk.names_of(place[0])
    return True


def wipe(node: "SimNode") -> None:
    """Empty the disk of a dead node."""
    node.disk.wipe()
    node.damage.append(ROOT)


def forget(node: "SimNode") -> None:
    """Delete promise, log and state from the disk of a dead node; its identity stays."""
    gone = (PROMISE_PATH, LOG_PATH, STATE_PATH)
    node.disk.lose(gone)
    node.damage += gone


def check_refusal(node: "SimNode", error: StorageError) -> None:
    """Check that a node that stops with a storage error has a damaged disk and names the damage."""
    if not node.damage:
        raise Broken("storage", f"node {node.replica}: {error}") from error
    if isinstance(error, WrongDirectoryError) != (ROOT in node.damage):
        raise Broken("storage", f"node {node.replica}, damaged at {node.damage}: {error}")
    places = {str(place) for path in node.damage for place in (path, path.parent)} - {"/"}
    # A crash can restore an older name of a file, so the name without its folder counts, too.
    places |= {path.name for path in node.damage if path.suffix}
    if ROOT not in node.damage and not any(place in str(error) for place in places):
        raise Broken("storage", f"node {node.replica}, damaged at {node.damage}: {error}")


def waits_for_repair(world: "World") -> bool:
    """Return whether no node can become leader until a lost voter is repaired."""
    sure = {n.replica for n in world.nodes if n.alive and not n.damage and not n.core.unsure}
    lost = {each.replica for each in world.nodes if each.damage}
    cores = [node.core for node in world.nodes if node.alive]
    known = [core.shape.sets_from(core.commit_index) for core in cores]
    sets = in_force(known) if known else (world.voters,)
    return any(lost & voters and not is_granted([voters], sure) for voters in sets)


def _sets(world: "World") -> "set[Voters]":
    """Return the voter sets that the running nodes count majorities of."""
    cores = [node.core for node in world.nodes if node.alive]
    return {each for core in cores for each in core._sets} or {world.voters}  # noqa: SLF001
