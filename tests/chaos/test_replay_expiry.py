"""What expires and what is retained, as the replay and the machine tell it."""

import random
from pathlib import Path

import numpy as np
import pytest

from chaos.oracle.story import LogStory
from chaos.sim.world.simdisk import SimDisk
from tests.chaos.replaying import Notes
from tests.seeds import seeds
from tests.timer.machines import START_MS, Log, machine_on, part_of
from timer.entries.payloads import GroupStart, Op
from timer.entries.policies import CLUSTER, Scope
from timer.model.units import TopicId

WAITS_MS = (0, 1, 700, 5_000, 700_000, 8 * 86_400_000)
STEPS = [*["fire", "ack"] * 4, "expire", "below", "policy", "checkpoint", "checkpoint", "group"]
STEPS += ["seek", "delete", "epoch"]
SAID: tuple[dict[str, int], ...] = (
    {},
    {"retention_ms": 0},
    {"retention_ms": 1_500},
    {"retention_ms": 10**7},
    {"ttl_ms": 5},
)


def random_log(chance: random.Random) -> Log:
    """Return a log of two topics in which messages are acked, expire and are retained."""
    log, machine = Log(), machine_on(SimDisk(), leads=False)
    log.topic("n/a")
    log.topic("b")
    for _ in range(120):
        for each in log.entries[machine.applied_index :]:
            machine.apply(each)
        topic = machine.topics[TopicId(chance.choice((1, 2)))]
        end, groups = topic.queue.end, [*topic.groups.values()]
        group_id = chance.choice(groups).group_id if groups else 0
        some = sorted(chance.sample(range(end), min(end, chance.choice((1, 3, 9)))))
        match chance.choice(STEPS):
            case "fire":
                count = chance.choice((1, 2, 8))
                log.schedule(part_of([(topic.topic_id, START_MS, b"m")] * count))
                log.fire(log.now_ms)
            case "ack" if groups:
                log.op(Op.RESERVE, topic.topic_id, group_id, [end])
                log.op(Op.ACK, topic.topic_id, group_id, chance.choice((some, range(end // 2))))
            case "expire" if groups:
                log.op(Op.EXPIRE, topic.topic_id, group_id, some)
            case "below" if end:
                log.op(Op.EXPIRE_BELOW, topic.topic_id, 0, [chance.randrange(end) + 1])
            case "policy":
                scopes = CLUSTER, Scope("n"), Scope("default"), Scope("", topic.topic_id)
                log.policy(chance.choice(scopes), **chance.choice(SAID))
            case "checkpoint":
                log.now_ms += chance.choice(WAITS_MS)
                log.checkpoint()
            case "group":
                start = chance.choice((GroupStart.EARLIEST, GroupStart.LATEST))
                log.create_group(topic.topic_id, chance.choice("gh"), start)
            case "seek" if groups and chance.random() < 0.5:
                log.op(Op.SEEK, topic.topic_id, group_id, [chance.randrange(end + 1)])
            case "delete" if groups and chance.random() < 0.3:
                log.op(Op.DELETE, topic.topic_id, group_id, [])
            case "epoch":
                log.begin_epoch()
            case _:
                log.now_ms += chance.choice(WAITS_MS)
    return log


SEEN: dict[str, int] = {"expired": 0, "retained": 0, "let go": 0}


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_replay_and_the_machine_agree_on_what_expires_and_what_is_kept(
    seed: int, tmp_path: Path
) -> None:
    log, machine = random_log(random.Random(seed)), machine_on(SimDisk(), leads=False)
    notes = Notes()
    story = LogStory(notes, tmp_path)
    for each in log.entries:
        machine.apply(each)
        story.apply(each)
        for topic_id, topic in machine.topics.items():
            kept = story.queues[topic_id]
            assert (kept.begin, kept.end) == (topic.queue.begin, topic.queue.end), each
            least = min((group.cursor for group in topic.groups.values()), default=0)
            SEEN["retained"] += least > topic.queue.begin
            SEEN["let go"] += bool(topic.retention_ms) and topic.queue.begin > 0
            for group in topic.groups.values():
                told = story.groups[group.group_id]
                assert (told.cursor, told.reserved) == (group.cursor, group.reserved)
                assert told.acked_count == group.acked_count
    for topic in machine.topics.values():
        for group in topic.groups.values():
            over = notes.over.get(group.group_id, [])
            offsets = np.array([offset for offset, *_ in over], np.uint64)
            assert group.is_acked(offsets).all()
            assert len({*offsets.tolist()}) == len(over)
            SEEN["expired"] += len(over)


def test_random_logs_hold_what_they_are_for() -> None:
    assert min(SEEN.values()) > 50, SEEN


def test_what_was_given_out_before_it_expired_is_known_by_its_attempts(tmp_path: Path) -> None:
    log, notes = Log(), Notes()
    log.topic("t")
    log.create_group(1, "g")
    log.op(Op.RESERVE, 1, 1, [10])
    log.schedule(part_of([(1, START_MS, b"m")] * 3))
    log.fire(START_MS)
    log.op(Op.ENDED, 1, 1, [1])
    log.op(Op.ACK, 1, 1, [0])
    expires = log.op(Op.EXPIRE_BELOW, 1, 0, [2])
    story = LogStory(notes, tmp_path)
    for each in log.entries:
        story.apply(each)
    assert notes.over == {1: [(1, 2, expires.index, expires.epoch, expires.time_ms, 0)]}
    assert [offset for offset, *_ in notes.acked[1]] == [0]
