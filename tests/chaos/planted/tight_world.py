"""Worlds with small disks, for planted bugs.

They are never drawn, because one in some hundred of them still uses up its reserve.
"""

import random
from typing import Final

from chaos.sim.timers.timers import EngineApp, TimerWorld
from chaos.sim.timers.town import Town
from chaos.sim.world.options import WorldOptions
from chaos.sim.world.referee import Broken
from chaos.sim.world.sim_node import SimNode
from chaos.sim.world.simdisk import STATE_PATH
from timer.files.disk import is_full
from timer.files.disk_reserve import VoterDisks
from timer.leader.leader import Leader
from timer.model.timer_errors import DiskFailedError
from timer.model.units import ReplicaId

PAYLOAD: Final = 3_000
"""Bytes that are added to each payload."""
RESERVE: Final = 300_000
"""Bytes of a small disk that are reserved for work that must go on."""
ROOM: Final = 100_000
"""Bytes of a small disk beside the reserve."""
LOOK_US: Final = 200_000
LINK_US: Final = 1_000


class TightApp(EngineApp):
    """Knows the room on the disks, as cluster/files/disk_room.py does."""

    def __init__(self, node: SimNode, town: Town) -> None:
        super().__init__(node, town)
        self._rooms: tuple[Leader, VoterDisks] | None = None
        node.later(0, self._look_at_room)

    def _look_at_room(self) -> None:
        node, before = self.node, self.engine.disk_space
        node.later(LOOK_US, self._look_at_room)
        room = before.after(node.disk.free_bytes(STATE_PATH), RESERVE)
        self.plane.use_disk_space(room)
        leader, now_ms = self.engine.leader, node.mono_ms()
        if leader is None:
            return
        if self._rooms is None or self._rooms[0] is not leader:
            self._rooms = leader, VoterDisks(node.replica, now_ms)
        rooms = self._rooms[1]
        rooms.store_report(node.replica, str(node.replica), room, now_ms)
        for other in node.world.nodes:
            if other is not node and other.alive:
                link, back = (node.replica, other.replica), (other.replica, node.replica)
                if not node.world.network.loses(link):
                    node.world.timeline.after(LINK_US, other.call, _tell_room, other, rooms, back)
        leader.disk_error = rooms.refusal(node.core.voters, now_ms)


def _tell_room(node: SimNode, rooms: VoterDisks, back: tuple[ReplicaId, ReplicaId]) -> None:
    """Report the room on this node's disk to the leader."""
    app = node.app
    assert isinstance(app, EngineApp)
    room, world = app.engine.disk_space, node.world

    def heard() -> None:
        asker = next(each for each in world.nodes if each.replica == back[1])
        if asker.alive:
            rooms.store_report(node.replica, str(node.replica), room, asker.mono_ms())

    if not world.network.loses(back):
        world.timeline.after(LINK_US, heard)


class TightNode(SimNode):
    """A node whose leader must reject requests before a disk uses up its reserve."""

    def fail(self, error: DiskFailedError) -> None:
        if is_full(error):
            used = self.disk.used_bytes()
            raise Broken("space", f"{self} filled its disk: {used} bytes, {RESERVE} in reserve")
        super().fail(error)


class TightWorld(TimerWorld):
    """A world with small disks of all voters, or of so many that the others are no majority."""

    make_node = TightNode
    app_type = TightApp

    def __init__(self, seed: int, options: WorldOptions | None = None) -> None:
        super().__init__(seed, options)
        self.town.padding = bytes(PAYLOAD)
        rng = random.Random(f"tight {seed}")
        voters = [node for node in self.nodes if node.replica in self.voters]
        fewest = (len(voters) + 1) // 2
        for node in rng.sample(voters, rng.choice((fewest, len(voters)))):
            node.disk.capacity_bytes = RESERVE + ROOM
