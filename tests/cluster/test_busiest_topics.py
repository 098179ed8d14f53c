"""Figures of single topics: the busiest are shown, the others are added up."""

from chaos.sim.world.simdisk import SimDisk
from cluster.observe.busiest_topics import HALF_LIFE_MS, OTHERS, BusiestTopics, TopicFigures
from tests.timer.machines import Log, machine_on, part_of
from timer.entries.policies import Scope
from timer.model.units import MonoMs


class Shop:
    """A machine with topics, and the busiest two of them."""

    def __init__(self) -> None:
        self.log, self.machine, self.ms = Log(), machine_on(SimDisk(), leads=False), 0
        self.machine.apply(self.log.begin_epoch())
        self.start()

    def start(self) -> None:
        """Start the figures again, as a restart of the node does."""
        self.busiest = BusiestTopics(self.machine, 2, lambda: MonoMs(self.ms), self.totals)

    def totals(self) -> TopicFigures:
        counts = self.machine.counts
        counters = counts.scheduled, counts.fired, counts.cancelled, counts.dropped, 0
        return TopicFigures("", counters, (counts.pending, 0, 0))

    def topic(self, name: str, timers: int) -> None:
        """Schedule timers in a topic; the first time makes it."""
        known = self.machine.topic_by_name.get(name)
        if known is None:
            self.machine.apply(self.log.topic(name))
            known = self.machine.topic_by_name[name]
        part = part_of([(known.topic_id, self.log.now_ms + 10_000, b"x")] * timers)
        self.machine.apply(self.log.schedule(part))

    async def scheduled(self) -> dict[str, int]:
        await self.busiest.measure()
        return {each.name: each.counters[0] for each in self.busiest.figures()}


async def test_counters_of_others_rise_by_their_own_timers_alone() -> None:
    shop = Shop()
    for name, timers in (("a", 50), ("b", 40), ("c", 10)):
        shop.topic(name, timers)
    first = await shop.scheduled()
    assert {*first} == {"a", "b", OTHERS}
    assert (first["a"], first["b"]) == (50, 40)
    shop.topic("a", 7)
    shop.topic("c", 5)
    second = await shop.scheduled()
    assert {name: second[name] - first[name] for name in first} == {"a": 7, "b": 0, OTHERS: 5}
    assert shop.busiest.figures()[-1].gauges == (15, 0, 0)
    shop.start()
    third = await shop.scheduled()
    assert third == {"a": 57, "b": 40, OTHERS: 0}, "the rise after a fall is that from zero"
    shop.topic("c", 1)
    assert (await shop.scheduled())[OTHERS] == 1


async def test_recent_activity_counts_most_and_a_place_is_kept_until_another_is_twice_as_busy() -> (
    None
):
    shop = Shop()
    for name, timers in (("a", 50), ("b", 40), ("c", 10)):
        shop.topic(name, timers)
    await shop.scheduled()
    shop.topic("c", 65)  # 75 in all, less than twice 40
    before = await shop.scheduled()
    assert {*before} == {"a", "b", OTHERS}
    shop.ms += 4 * HALF_LIFE_MS
    shop.topic("c", 10)  # as much as 160 then
    after = await shop.scheduled()
    assert {*after} == {"a", "c", OTHERS}
    assert after[OTHERS] == before[OTHERS] + 10, "a counter never falls"


async def test_topics_that_hold_timers_are_shown_until_they_hold_none() -> None:
    shop = Shop()
    for name, timers in (("a", 50), ("b", 40), ("c", 1), ("d", 1), ("e", 9)):
        shop.topic(name, timers)

    async def held(*paused: str) -> dict[str, int]:
        for name in set("acde"):
            scope = Scope("", shop.machine.topic_by_name[name].topic_id)
            shop.machine.apply(shop.log.policy(scope, paused=name in paused))
        shop.log.now_ms += 10_000
        shop.machine.apply(shop.log.fire(shop.log.now_ms))
        await shop.busiest.measure()
        return {each.name: each.gauges[1] for each in shop.busiest.figures()}

    assert await held("a", "c") == {"a": 50, "b": 0, "c": 1, OTHERS: 0}
    shop.topic("d", 3)
    shop.topic("e", 3)
    assert await held("a", "c", "d", "e") == {"a": 50, "b": 0, "c": 1, OTHERS: 0}, "they stay"
    assert await held("d", "e") == {"a": 0, "b": 0, "d": 3, "e": 3, OTHERS: 0}


async def test_deleted_topics_leave() -> None:
    shop = Shop()
    shop.topic("a", 5)
    shop.topic("b", 5)
    await shop.scheduled()
    shop.machine.apply(shop.log.delete_topic(shop.machine.topic_by_name["a"].topic_id))
    assert {*await shop.scheduled()} == {"b", OTHERS}
    assert shop.busiest.figures()[-1].gauges == (0, 0, 0)


async def test_no_topic_is_remembered_before_the_first_measurement() -> None:
    shop = Shop()
    shop.topic("a", 5)
    shop.topic("b", 5)
    shop.machine.apply(shop.log.delete_topic(shop.machine.topic_by_name["a"].topic_id))
    assert not shop.busiest._changed
    assert {*await shop.scheduled()} == {"b", OTHERS}


async def test_without_a_place_no_topic_is_looked_at() -> None:
    shop = Shop()
    none = BusiestTopics(shop.machine, 0, lambda: MonoMs(0), shop.totals)
    shop.topic("a", 5)
    await none.measure()
    assert none.figures() == ()
