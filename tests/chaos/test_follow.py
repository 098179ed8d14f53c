"""Following logs as they grow: half-written, cut, rolled, removed; and what is committed."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.live.follow import FollowedFrame, FollowedWindow, Follower, LogDropped, commit_end
from tests.chaos import world
from timer.entries.entry_frame import EntryKind
from timer.files.disk import RealDisk
from timer.files.log import Log
from timer.model.units import Epoch, LogIndex


def frames(*epochs: int) -> list[bytes]:
    """Return frames 1, 2, … of these epochs."""
    log = world.Log()
    for epoch in epochs:
        log.current = Epoch(epoch)
        log.entry(EntryKind.CHECKPOINT, b"", at_ms=epoch)
    return log.frames


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A production log whose segments hold three small frames."""
    log = Log.open(RealDisk(), tmp_path / "n1/log", segment_size=48 + 3 * 40)
    yield log
    log.close()


def follow_all(tmp_path: Path) -> Follower:
    """Return a follower of one log, all of which counts as committed."""
    return Follower({"n1": tmp_path / "n1/log"})


def indexes(follower: Follower) -> list[int]:
    found, divergences = follower.poll()
    assert divergences == []
    return [item.index for item in found]


def window(*epochs: int, first: int = 1, full: bool = False) -> FollowedWindow:
    held = [
        FollowedFrame(LogIndex(first + i), Epoch(epoch), 0, Path(), 0, memoryview(b""))
        for i, epoch in enumerate(epochs)
    ]
    return FollowedWindow(held, full=full)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        pytest.param([window(1, 1, 1), window(1, 1), window(1)], (2, 1), id="on a majority"),
        pytest.param([window(1, 1, 1), window(), window()], None, id="on one alone"),
        pytest.param([window(1, 1), window(1, 1), window(1, 2)], (1, 1), id="a later epoch lacks"),
        pytest.param([window(1, 2), window(1, 2), window(1, 1)], (2, 2), id="one older"),
        pytest.param([window(1, 1, 2), window(1, 1), window()], (2, 1), id="a later epoch has it"),
        pytest.param(
            [window(1, 1, full=True), window(1, 1, 1), window(1, 1, 1)], (2, 1),
            id="not beyond what was seen of a log",
        ),
        pytest.param(
            [window(1, 1, first=5), window(1, 1, first=5), window(1, 1)], (6, 1), id="one behind",
        ),
        pytest.param(
            [window(1, 1), window(1, 1), window(1, 1), window(2), window()], None, id="of five",
        ),
    ],
)  # fmt: skip
def test_committed_is(windows: list[FollowedWindow], expected: tuple[int, int] | None) -> None:
    assert commit_end(windows, len(windows) // 2 + 1) == expected


def test_entries_come_once_over_segments_as_they_are_written(tmp_path: Path, log: Log) -> None:
    follower = follow_all(tmp_path)
    assert indexes(follower) == []
    written = frames(*[1] * 10)
    for start, end in ((0, 1), (1, 3), (3, 9), (9, 10)):
        log.append(written[start:end])
        assert indexes(follower) == [*range(start + 1, end + 1)]
        assert indexes(follower) == []


def test_half_written_frame_is_waited_for_at_every_byte(tmp_path: Path, log: Log) -> None:
    written = frames(1, 1)
    log.append(written[:1])
    follower = follow_all(tmp_path)
    assert indexes(follower) == [1]
    path = tmp_path / f"n1/log/{1:016x}.log"
    whole = path.read_bytes()
    for cut in range(1, len(written[1])):
        path.write_bytes(whole + written[1][:cut])
        assert indexes(follower) == []
    path.write_bytes(whole + written[1])
    assert indexes(follower) == [2]


def test_unborn_segment_is_waited_for(tmp_path: Path, log: Log) -> None:
    written = frames(1, 1, 1, 1)
    log.append(written)
    path = tmp_path / f"n1/log/{4:016x}.log"
    whole = path.read_bytes()
    follower = follow_all(tmp_path)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert indexes(follower) == ([1, 2, 3] if cut == 0 else [])
    path.write_bytes(whole)
    assert indexes(follower) == [4]


def test_uncommitted_suffix_that_is_replaced_is_never_handed_on(tmp_path: Path) -> None:
    chance = random.Random(7)
    nodes = [Log.open(RealDisk(), tmp_path / name / "log", segment_size=200) for name in "abc"]
    follower = Follower({name: tmp_path / name / "log" for name in "abc"})
    handed: list[FollowedFrame] = []
    agreed, epoch = world.Log(), 0
    for _ in range(40):
        epoch += 1
        leader, other, third = chance.sample(nodes, 3)
        # Its own suffix, which nobody else gets.
        lonely = world.Log(agreed)
        lonely.current = Epoch(epoch)
        for _ in range(chance.randrange(4)):
            lonely.entry(EntryKind.CHECKPOINT, b"", at_ms=epoch)
        catch_up(third, agreed, committed=len(handed))
        third.append(lonely.frames[third.last_index :])
        handed += follower.poll()[0]
        # The next leader knows nothing of it, and commits on the other two.
        epoch += 1
        agreed.current = Epoch(epoch)
        for _ in range(1 + chance.randrange(4)):
            agreed.entry(EntryKind.CHECKPOINT, b"", at_ms=epoch)
        for node in (leader, other):
            catch_up(node, agreed, committed=len(handed))
            found, divergences = follower.poll()
            handed += found
            assert divergences == []
        assert len(handed) == len(agreed.frames)
    epochs = [int.from_bytes(frame[16:24], "little") for frame in agreed.frames]
    assert [item.epoch for item in handed] == epochs
    assert [item.index for item in handed] == [*range(1, len(epochs) + 1)]
    for node in nodes:
        node.close()


def catch_up(node: Log, story: world.Log, *, committed: int) -> None:
    """Bring a node's log to what the cluster agreed on."""
    same = committed
    while same < min(node.last_index, len(story.frames)):
        epoch = int.from_bytes(story.frames[same][16:24], "little")
        if node.epoch_at(LogIndex(same + 1)) != epoch:
            break
        same += 1
    node.truncate_after(LogIndex(min(same, node.last_index)))
    node.append(story.frames[node.last_index :])


def test_removed_segments_are_passed_over_or_missed_loudly(tmp_path: Path, log: Log) -> None:
    written = frames(*[1] * 10)
    log.append(written[:7])
    follower = follow_all(tmp_path)
    assert indexes(follower) == [*range(1, 8)]
    log.append(written[7:])
    log.drop_before(LogIndex(8))
    assert indexes(follower) == [8, 9, 10]
    with pytest.raises(LogDropped, match="begins with entry 7, not 1"):
        follow_all(tmp_path).poll()


def test_node_that_holds_something_else_is_told_of(tmp_path: Path) -> None:
    same = frames(1, 1, 1)
    other = world.Log()
    other.current = Epoch(1)
    for at_ms in (1, 9, 9):  # the second and third are not what the others have
        other.entry(EntryKind.CHECKPOINT, b"", at_ms=at_ms)
    world.write_log(tmp_path / "a/log", same)
    world.write_log(tmp_path / "b/log", same)
    world.write_log(tmp_path / "c/log", other.frames)
    follower = Follower({name: tmp_path / name / "log" for name in "abc"})
    found, divergences = follower.poll()
    assert [item.index for item in found] == [1, 2, 3]
    assert [(each.node, each.index) for each in divergences] == [("c", 2), ("c", 3)]
    assert follower.poll() == ([], [])


def test_what_one_node_has_not_applied_waits(tmp_path: Path, log: Log) -> None:
    log.append(frames(1, 1, 1))
    applied = [LogIndex(2)]
    follower = Follower({"n1": tmp_path / "n1/log"}, applied=lambda: applied[-1])
    assert indexes(follower) == [1, 2]
    applied.append(LogIndex(7))
    assert indexes(follower) == [3]
