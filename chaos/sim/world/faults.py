"""The faults of a world. Each is a method `_<name>`; chaos/sim/world/options.py has the lists.

    power, power_all     the machine of one or of all nodes loses power; unsynced data are lost or
                         torn
    kill, terminate      the process is killed; or it gets SIGTERM, drains, hands over and writes a
                         manifest
    pause                SIGSTOP, for shorter or longer than the lease
    handover             an operator orders the leader to hand over
    isolate, split       a node loses the links to all others, or two nodes lose theirs
    one_way              a node receives nothing, or its messages are lost; for all peers or one
    clock                a wall clock jumps, or runs fast or slow
    flip, shorten, wipe  see chaos/sim/world/disk_loss.py

The methods of the others describe them; those of ARMED are `on_...`.

Every fault except damage ends by itself, or when the world is healed. A drawn fault may have no
effect: a dead node can't be killed, and the last majority of undamaged disks must stay. Each method
therefore returns whether it changed the world, and only such faults count. A fault of several steps
is a script: a generator that yields its waits in microseconds, and notes itself when it strikes.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from chaos.sim.world import disk_loss
from chaos.sim.world.options import FAULTS_MIN
from chaos.sim.world.sim_node import SimNode
from chaos.sim.world.simdisk import LOG_PATH
from replication.core.core_events import Handover
from replication.core.quorum import Voters
from timer.entries.entry_frame import HEADER_SIZE, Entry, frame_at
from timer.files.log import MARK_NAME
from timer.files.segment import HEADER_SIZE as SEGMENT_HEADER_SIZE
from timer.model.units import ReplicaId

if TYPE_CHECKING:
    from chaos.sim.world.world import World

ARMED: Final = ("newborn", "ambush", "mid_sync", "rival")
"""Faults that wait for their moment (`on_...`)."""
LONG_MS: Final = 4_000
EDGE_PROBABILITY: Final = 0.3
"""Probability that an armed fault strikes when its moment comes."""
Script = Iterator[int]
Links = list[tuple[SimNode, SimNode]]


class FaultInjector:
    """Injects faults until `end_us`."""

    def __init__(self, world: "World", rng: random.Random, end_us: int) -> None:
        self._world, self._rng = world, rng
        self.struck: list[str] = []
        """The kind of each fault that has struck, in order."""
        self._armed: set[str] = set()
        self._changes: dict[ReplicaId, tuple[Voters, Voters]] = {}
        """Leader -> the new and the old voters of the last change; empty: it has begun to lead."""
        self._kinds: dict[str, Callable[[], bool | Script]] = {
            kind: partial(self._arm, kind) if kind in ARMED else getattr(self, f"_{kind}")
            for kind in world.options.faults
        }
        if not self._kinds:
            return
        first_us = end_us // (FAULTS_MIN + 1)
        for number in range(1, FAULTS_MIN + 1):  # a minimum, even if the mean gap is long
            world.timeline.after(first_us * number, self._inject)
        self._go_on(self._inject_until(end_us))

    def _inject_until(self, end_us: int) -> Script:
        while True:
            gap_us = int(self._rng.expovariate(1.0) * self._world.options.fault_gap_ms * 1_000)
            if self._world.timeline.now_us + gap_us >= end_us:
                return
            yield gap_us
            self._inject()

    def _inject(self) -> None:
        kind = self._rng.choice(sorted(self._kinds))
        self._world.timeline.note("fault", kind)
        self._try(kind, self._kinds[kind])

    def _try(self, kind: str, call: Callable[[], bool | Script]) -> None:
        done = call()
        if isinstance(done, Iterator):
            self._go_on(done)
        elif done:
            self.struck.append(kind)

    def _go_on(self, script: Script) -> None:
        """Continue a script up to its next wait."""
        wait_us = next(script, None)
        if wait_us is not None:
            self._world.timeline.after(wait_us, self._go_on, script)

    def one_more(self) -> bool:
        """Inject another fault if fewer than FAULTS_MIN have struck; return whether it did."""
        if not self._kinds or len(self.struck) >= FAULTS_MIN:
            return False
        self._inject()
        return True

    # ---------------------------------------------------------------- helpers

    def _node(self) -> SimNode:
        """Return a random node. Half of the picks are leaders, where faults have more effect."""
        leaders = self._leaders()
        if leaders and self._rng.random() < 0.5:
            return self._rng.choice(leaders)
        return self._rng.choice(self._world.nodes)

    def _leaders(self) -> list[SimNode]:
        return [node for node in self._world.nodes if node.leading]

    def _others(self, node: SimNode) -> list[SimNode]:
        return [each for each in self._world.nodes if each is not node]

    def _for_a_while(self, undo: Callable[[], object]) -> None:
        """Undo a fault after a time near the lease, or after a long time."""
        ms = self._rng.choice((50, 400, 600, 1_200, self._rng.randint(0, LONG_MS)))
        self._world.timeline.after(ms * 1_000, undo)

    def _restart(self, node: SimNode, stop: Callable[[SimNode], bool]) -> bool:
        """Stop a node, and start it again later; return whether it ran."""
        ran = stop(node)
        self._for_a_while(node.start)
        return ran

    def _cut(self, links: Links) -> Callable[[], None]:
        """Cut links; return a function that mends them, if the world was not healed meanwhile."""
        network = self._world.network
        pairs = [(one.replica, other.replica) for one, other in links]
        heals = self._world.heals
        for pair in pairs:
            network.cut(pair)

        def mend() -> None:
            if heals == self._world.heals:
                for pair in pairs:
                    network.mend(pair)

        return mend

    def _cut_for_a_while(self, links: Links) -> bool:
        self._for_a_while(self._cut(links))
        return True

    def _appoint(self, node: SimNode) -> None:
        if not self._world.heals:
            self._world.control.appoint(node.replica)

    def _lose_tail(self, node: SimNode) -> bool:
        """Cut a node's power, and remove the synced end of its log; at most one node at a time."""
        if any(each.lied or each.damage for each in self._world.nodes) or not node.alive:
            return False
        node.stop_hard()
        node.lied = lose_tail(node, self._rng)
        self._for_a_while(node.start)
        return node.lied

    # ---------------------------------------------------------------- moments

    def on_leader(self, node: SimNode) -> None:
        """Cut the power of a new leader; its EPOCH entry may be on no, some or all nodes.

        Or, after a change of the voters, separate it and the new voters from the old ones, and
        appoint an old voter.
        """
        if self._is_moment("newborn"):
            self._strike("newborn", node.stop_hard, self._rng.choice((0, 1_000, 10_000)))
            self._for_a_while(node.start)
        new, old = self._changes.pop(node.replica, (frozenset(), frozenset()))
        there = [each for each in self._world.nodes if each.replica in old and each is not node]
        if there and self._is_moment("rival", 1 / EDGE_PROBABILITY):
            here = [each for each in self._world.nodes if each is node or each.replica in new]
            soon_us = self._rng.choice((0, 1_000, 10_000))
            self._strike("rival", lambda: self._cut_for_a_while(between(here, there)), soon_us)
            then_us = soon_us + self._rng.randint(500, 1_500) * 1_000
            self._world.timeline.after(then_us, self._appoint, self._rng.choice(there))

    def on_appointed(self) -> None:
        """Inject a fault while the leadership moves to another node."""
        if self._is_moment("ambush"):
            faults = self._power, self._split, self._parts, self._slow_disk
            self._strike("ambush", self._rng.choice(faults), self._rng.choice((0, 5_000, 30_000)))

    def on_sync(self, node: SimNode, took_us: int, *, promise: bool) -> None:
        """Stop a node inside of a sync that takes `took_us`."""
        if self._is_moment("mid_sync", 1.0 if promise else 0.05):
            stop = self._rng.choice((node.stop_hard, node.stop))
            self._strike("mid_sync", stop, self._rng.randrange(took_us + 1))
            self._for_a_while(node.start)

    def on_change(self, leader: ReplicaId, before: Voters, after: Voters) -> None:
        """Note a change of the voters that a leader is appointed for."""
        self._changes = {leader: (after - before, before)}

    def on_killed_in_write(self, node: SimNode) -> None:
        """Count the death of a process inside a write; start the next process later."""
        self.struck.append("torn_write")
        self._for_a_while(node.start)

    def on_disk_failed(self, *, full: bool) -> None:
        """Count the death of a process by a full disk or a failed sync."""
        kind = "full_disk" if full else "sync_fails"
        if kind in self._kinds:
            self.struck.append(kind)

    def _strike(self, kind: str, call: Callable[[], bool], delay_us: int) -> None:
        self._world.timeline.after(delay_us, self._try, kind, call)

    def _arm(self, kind: str) -> bool:
        self._armed.add(kind)
        return False  # it counts when it strikes

    def _is_moment(self, kind: str, share: float = 1.0) -> bool:
        """Return whether an armed fault strikes now; `share`: of the usual probability."""
        armed = kind in self._armed and not self._world.heals
        return armed and self._rng.random() < EDGE_PROBABILITY * share

    # ---------------------------------------------------------------- processes and clocks

    def _power(self) -> bool:
        return self._restart(self._node(), SimNode.stop_hard)

    def _power_all(self) -> bool:
        ran = [self._restart(node, SimNode.stop_hard) for node in self._world.nodes]
        return any(ran)

    def _kill(self) -> bool:
        return self._restart(self._node(), SimNode.stop)

    def _terminate(self) -> bool:
        node = self._node()
        if not node.alive or node.paused:
            return False
        node.terminate()
        return True

    def _torn_write(self) -> bool:
        """Kill a process inside its next write to the log; the fault counts then."""
        node = self._node()
        if node.alive:
            node.disk.die_in_write(self._rng, LOG_PATH)
        return False

    def _pause(self) -> bool:
        node = self._node()
        ran = (node.alive or node.refetch is not None) and not node.paused
        node.pause()
        self._for_a_while(node.resume)
        return ran

    def _clock(self) -> bool:
        node, rng = self._node(), self._rng
        if rng.random() < 0.5:
            node.set_clock(jump_ms=rng.choice((-3_600_000, -500, 500, 86_400_000)))
        else:
            node.set_clock(drift_ppm=rng.choice((-500_000, -10_000, 10_000, 1_000_000)))
        return True

    def _handover(self) -> bool:
        node = self._node()
        leads = node.leading  # other nodes have no leadership to hand over
        node.call(node.handle, Handover())
        return leads

    # ---------------------------------------------------------------- links

    def _isolate(self) -> bool:
        node, control = self._node(), self._world.control
        mend = self._cut(between([node], self._others(node)))

        def hear() -> None:
            if node.replica in control.deaf:
                control.deaf.remove(node.replica)
                control.hear(node)

        if self._rng.random() < 0.5:
            control.deaf.add(node.replica)
            self._world.timeline.after(LONG_MS * 1_000, hear)
        self._for_a_while(mend)
        return True

    def _one_way(self) -> bool:
        node = self._node()
        others = self._others(node)
        if self._rng.random() < 0.3:
            others = [self._rng.choice(others)]
        deaf = self._rng.random() < 0.5
        return self._cut_for_a_while([(each, node) if deaf else (node, each) for each in others])

    def _split(self) -> bool:
        one, other = self._rng.sample(self._world.nodes, 2)
        return self._cut_for_a_while(between([one], [other]))

    def _parts(self) -> bool:
        """Cut all links between two groups of nodes."""
        nodes = self._world.nodes
        some = self._rng.sample(nodes, self._rng.randint(1, len(nodes) - 1))
        return self._cut_for_a_while(between(some, [each for each in nodes if each not in some]))

    def _slow_link(self) -> bool:
        """Delay the messages from a node, to it or both, and lose none."""
        network, node = self._world.network, self._node()
        others = self._others(node)
        if self._rng.random() < 0.5:
            others = [self._rng.choice(others)]
        links = [(node.replica, each.replica) for each in others]
        back = [(to, sender) for sender, to in links]
        links = self._rng.choice((links, back, links + back))
        more_us = self._rng.choice((100_000, 300_000, 1_000_000))
        for link in links:
            network.slow(link, more_us)

        def undo() -> None:
            for link in links:
                network.slow(link, 0)

        self._for_a_while(undo)
        return True

    # ---------------------------------------------------------------- disks

    def _full_disk(self) -> bool:
        """Leave at most 5,000 bytes on a disk for a while.

        The process stops at the first write that does not fit; the fault counts then. Restarts
        fail until there is room again.
        """
        disk = self._node().disk
        disk.capacity_bytes = disk.used_bytes() + self._rng.choice((0, 1, 100, 5_000))
        self._for_a_while(partial(setattr, disk, "capacity_bytes", None))
        return False

    def _sync_fails(self) -> bool:
        """Let one of the next six fsyncs fail; the fault counts then."""
        node = self._node()
        if node.alive:
            node.disk.fail_sync(self._rng, after=self._rng.randint(0, 5))
        return False

    def _slow_disk(self) -> bool:
        node = self._node()
        node.slow_disk = self._rng.choice((10, 100))
        self._for_a_while(partial(setattr, node, "slow_disk", 1))
        return True

    def _flip(self) -> bool:
        return self._damage(shortens=False)

    def _shorten(self) -> bool:
        return self._damage(shortens=True)

    def _damage(self, *, shortens: bool) -> bool:
        """Damage a file of a voter. Its process restarts, or runs on if the file is not shortened.

        Returns whether there was a file to damage.
        """
        node = self._node()
        if not disk_loss.may_damage(self._world, node):
            return False
        restarts = shortens or self._rng.random() < 0.7
        if restarts:
            self._rng.choice((node.stop, node.stop_hard))()
        damaged = disk_loss.hurt(node, self._rng, shortens=shortens)
        if restarts:
            self._for_a_while(node.start)
        return damaged

    def _wipe(self) -> bool:
        node = self._node()
        if not disk_loss.may_damage(self._world, node):
            return False
        was_empty = disk_loss.ROOT in node.damage
        node.stop_hard()
        disk_loss.wipe(node)
        self._for_a_while(node.start)
        self._for_a_while(self._world.add_learner().start)  # the machine that replaces it
        return not was_empty

    # ---------------------------------------------------------------- scripts

    def _forget(self) -> Script:
        """Delete promise, log and state of a voter that was added later, beside a lagging voter.

        For a founder's loss see `_wipe`.
        """
        world = self._world

        def forgets(node: SimNode) -> bool:
            added = node.replica not in world.voters and len(node.core.voters) % 2
            if not added or node.damage or not disk_loss.may_damage(world, node):
                return False  # with an even number, the others need the lagging or this voter
            node.stop_hard()
            disk_loss.forget(node)
            self._for_a_while(world.add_learner().start)
            return True

        added = [node for node in world.nodes if node.replica not in world.voters]
        return self._lose_beside("forget", forgets, among=added)

    def _lying_disk(self) -> bool | Script:
        """Lose the end of a node's log; in half of the cases beside a lagging voter."""
        if self._rng.random() < 0.5:
            return self._lose_tail(self._node())
        return self._lose_beside("lying_disk", self._lose_tail)

    def _late_answer(self) -> Script:
        """Lose the end of a voter's log while answers of its old process are under way."""
        return self._lose_beside("late_answer", self._lose_tail, late_us=200_000)

    def _overtaken(self) -> Script:
        """Lose the end of a voter's log, and let the next process's answers arrive first."""
        return self._lose_beside("overtaken", self._lose_tail, late_us=150_000, overtakes=True)

    def _lose_beside(
        self,
        kind: str,
        lose: Callable[[SimNode], bool],
        *,
        among: Sequence[SimNode] | None = None,
        late_us: int = 0,
        overtakes: bool = False,
    ) -> Script:
        """Let a voter lose data while another one lags behind, and stop the leader at once.

        The loss matters most then: the others need a voter that lost entries. With late answers
        the leader stops about when they arrive.

        Args:
            kind: The kind of the fault.
            lose: Stops a voter and takes its data; returns whether there were any.
            among: The voters that may lose data. None: all.
            late_us: Delay of the voter's answers to the leader before the loss.
            overtakes: The next process's answers may arrive first. The voter restarts once more.
        """
        world, rng, trio = self._world, self._rng, self._trio(among)
        if trio is None:
            return
        leader, node, lagging = trio
        answers = (node.replica, leader.replica)
        world.network.slow(answers, late_us)
        mend = self._cut(between([leader], [lagging]))
        yield rng.randint(250, 400) * 1_000
        world.network.slow(answers, 0)
        if world.heals or not node.alive or not lose(node):
            mend()
            return
        self.struck.append(kind)
        if overtakes:
            world.network.reopen(answers)
            node.slow_disk = 100
        world.timeline.after(1_000 if overtakes else rng.choice((1_000, 20_000)), node.start)
        yield rng.randint(100, 300) * 1_000 if late_us else 0
        mend()
        node.slow_disk = 1
        if not world.heals:
            if overtakes:
                rng.choice((node.stop, node.stop_hard))()
                world.timeline.after(20_000, node.start)
            leader.stop_hard()
            world.timeline.after(rng.randint(2_000, LONG_MS) * 1_000, leader.start)

    def _stale_return(self) -> Script:
        """Cut the leader off, and appoint it at once when the links return.

        It still accepts requests while it is cut off. The others have had one or two other leaders
        by the time of its return.
        """
        leaders = self._leaders()
        if not leaders:
            return
        node, others = leaders[0], self._others(leaders[0])
        mend = self._cut(between([node], others))
        away_ms = self._rng.randint(1_000, LONG_MS)
        if self._rng.random() < 0.7:
            second = self._rng.choice(others)
            again_ms = self._rng.randint(900, 3_000)
            self._world.timeline.after(again_ms * 1_000, self._appoint, second)
            away_ms = max(away_ms, again_ms + self._rng.randint(600, 1_500))
        self.struck.append("stale_return")
        yield away_ms * 1_000
        mend()
        self._appoint(node)

    def _usurp(self) -> Script:
        """Cut the leader off, and appoint another one about when its lease ends.

        One follower has a slow disk, and its answers still reach the leader. The last one comes
        late, because it waits for a sync.
        """
        leaders = self._leaders()
        followers = [node for node in self._world.nodes if node.alive and not node.leading]
        if len(leaders) != 1 or len(followers) < 2:
            return
        leader, (slow, other) = leaders[0], self._rng.sample(followers, 2)
        slow.slow_disk = 100
        rest = [each for each in self._others(leader) if each is not slow]
        part_us, appoint_us = self._rng.randint(20, 150) * 1_000, self._rng.randint(300, 1_200)
        self._world.timeline.after(appoint_us * 1_000, self._appoint, other)
        self.struck.append("usurp")
        yield part_us
        slow.slow_disk = 1
        self._cut_for_a_while([(leader, slow), *between([leader], rest)])

    def _trio(self, among: Sequence[SimNode] | None) -> tuple[SimNode, SimNode, SimNode] | None:
        """Return the leader, a voter of `among`, and another voter. None if there are none."""
        leaders = self._leaders()
        if len(leaders) != 1:
            return None
        voters = leaders[0].core.voters
        able = [n for n in self._world.nodes if n.alive and not n.leading and n.replica in voters]
        some = able if among is None else [node for node in able if node in among]
        if not some or len(able) < 2:
            return None
        node = self._rng.choice(some)
        return leaders[0], node, self._rng.choice([each for each in able if each is not node])


def between(some: Sequence[SimNode], others: Sequence[SimNode]) -> Links:
    """Return the links between two groups of nodes, in both directions."""
    links = [(one, other) for one in some for other in others]
    return links + [(other, one) for one, other in links]


def lose_tail(node: SimNode, rng: random.Random) -> bool:
    """Remove synced entries at the end of a dead node's log, none that its manifest covers.

    Returns:
        Whether there were such entries.
    """
    disk, floor = node.disk, node.world.make_app(node).applied_index
    path = LOG_PATH / [name for name in disk.list_dir(LOG_PATH) if name.endswith(".log")][-1]
    data = memoryview(disk.read(path))
    position, cuts = SEGMENT_HEADER_SIZE, list[int]()
    while isinstance(entry := frame_at(data, position), Entry):
        if entry.index > floor:
            cuts.append(position + rng.randrange(HEADER_SIZE))
        position += HEADER_SIZE + len(entry.payload)
    if not cuts:
        return False
    file = disk.open_append(path)
    file.truncate(rng.choice(cuts[-5:]))
    file.sync()
    file.close()
    if disk.exists(LOG_PATH / MARK_NAME):
        # With an intact mark the log would detect the missing entries and reject the start.
        disk.flip(LOG_PATH / MARK_NAME, 16)
    return True
