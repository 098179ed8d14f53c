"""Sums over topics equal the sum of all topics, after any changes since the last read."""

import random
from types import SimpleNamespace
from typing import Any, cast

from chaos.sim.world.simdisk import SimDisk
from cluster.observe.apply_metrics import ApplyMetrics
from cluster.state.topic_totals import Totals
from tests.timer.machines import START_MS, Log, machine_on, part_of
from timer.entries.payloads import Op
from timer.model.units import TopicId
from timer.state.apply_results import DeleteTopicApplied


def test_totals_are_the_sums_over_all_topics_after_whatever_happened() -> None:
    rng, log, machine = random.Random(1), Log(), machine_on(SimDisk(), leads=True)
    log.topic("before")
    log.schedule(part_of([(1, START_MS, b"x")]))
    log.fire(log.now_ms)
    for entry in log.entries:
        machine.apply(entry)
    totals = Totals(machine)
    assert totals.ready == 1
    host: Any = SimpleNamespace(totals=totals, leader=None)
    metrics = ApplyMetrics(cast("Any", None), cast("Any", None), host)
    seen, expired_deleted = set(), 0
    for _ in range(400):
        ids = [*machine.topics] or [TopicId(0)]
        topic = rng.choice(ids)
        groups = [*machine.topics[topic].groups.values()] if topic else []
        what = rng.randrange(9)
        if what == 0 or not topic:
            log.topic(f"t{rng.randrange(20)}")
        elif what == 1:
            log.delete_topic(topic)
        elif what == 2:
            log.create_group(topic, f"g{rng.randrange(2)}")
        elif what == 3 and groups:
            log.op(Op.RESERVE, topic, groups[0].group_id, [1_000])
        elif what == 4 and groups:
            log.op(Op.ACK, topic, groups[0].group_id, range(rng.randrange(8)))
        elif what == 5:
            log.op(Op.EXPIRE_BELOW, topic, 0, [machine.topics[topic].queue.end // 2])
        else:
            log.schedule(part_of([(topic, START_MS, b"x")] * rng.randrange(1, 4)))
            log.fire(log.now_ms)
        for entry in log.entries[machine.applied_index :]:
            applied = machine.apply(entry)
            metrics.on_applied(entry, applied)
            if isinstance(applied, DeleteTopicApplied) and applied.topic is not None:
                expired_deleted += applied.topic.expired
        if rng.randrange(3) == 0:
            there = machine.topics.values()
            expired = sum(t.expired for t in there) + expired_deleted
            expected = sum(t.ready for t in there), expired
            assert (totals.ready, totals.n_expired) == expected
            seen.add(expected)
    assert len(seen) > 50
    assert expired_deleted
