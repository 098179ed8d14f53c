"""Continuous backups without processes: the shipped log, gaps, and states between two backups."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from cluster.api import log_shipping
from cluster.backup import log_shipper
from cluster.backup.backup_run import BackupRun
from cluster.backup.backup_store import BackupError, BackupStore, WrongStore
from cluster.backup.catalogue import read_catalogues
from cluster.backup.log_parts import LogEnd, LogPart, StoredLog, entries_after, write_part
from cluster.backup.log_shipper import (
    GAP_S,
    IDLE_PART_S,
    QUIET_S,
    RETRY_S,
)
from cluster.backup.roll_forward import Until
from cluster.backup.store_care import damages_of, gaps_of, prune
from tests.cluster.backups import plan_of
from tests.cluster.shipping import (
    DISK,
    Shipped,
    Shipper,
    at,
    backed_up,
    first,
    frame_of,
    state_at,
    stored,
)
from tests.timer.machines import START_MS, Log, engine_on, state_of
from timer.entries.entry_frame import Entry
from timer.model.timer_errors import NotReadyError, UnreadableFileError
from timer.model.units import Epoch, LogIndex, UnixMs
from timer.recovery.snapshot_source import PINNED_MS
from timerclient.cli.timerctl import main as timerctl
from timerclient.client.timer_client import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import NotFound


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
def test_state_at_every_index_after_a_backup_is_the_one_that_the_node_had(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(log_shipping, "CHUNK_SIZE", chunk)
    monkeypatch.setattr(log_shipper, "PART_BYTES", 700)
    node, shipper = backed_up(tmp_path, store)
    assert shipper.done == [10]
    node.applied = 25
    shipper.step()
    node.applied = len(node.log.entries)
    shipper.step(IDLE_PART_S)
    assert shipper.told == []
    parts = stored(store).parts
    assert len(parts) >= 3
    assert [part.first for part in parts] == [11, *(part.last + 1 for part in parts[:-1])]
    for index in range(10, len(node.log.entries) + 1):
        found = state_at(store, tmp_path / f"at{index}", Until(index=LogIndex(index)))
        assert found == at(node.log, index), index
    whole = at(node.log, len(node.log.entries))
    assert state_at(store, tmp_path / "all", Until()) == whole
    time_ms = node.log.entries[-5].time_ms
    last = max(entry.index for entry in node.log.entries if entry.time_ms <= time_ms)
    assert last < len(node.log.entries)
    assert state_at(store, tmp_path / "timed", Until(time_ms=time_ms)) == at(node.log, last)
    assert damages_of(store)[1] == []
    lasts = {part.last for part in parts}
    assert {claimed for *_, claimed in node.asked} <= {0, 10, *lasts}, "only what is in the store"


def test_shipper_that_begins_again_continues_and_one_beside_it_does_no_harm(
    tmp_path: Path, store: BackupStore
) -> None:
    node, one = backed_up(tmp_path, store)
    node.applied = 20
    one.step()
    node.applied = 22
    other = Shipper(node, store)  # after a restart: it continues
    other.step()
    assert [(part.first, part.last) for part in stored(store).parts] == [(11, 20), (21, 22)]
    assert other.done == []
    node.applied = 30
    one.step()  # it still runs: its part overlaps
    other.step()
    assert [(each.first, each.last) for each in stored(store).parts][1:] == [
        (21, 22),
        (21, 30),
        (23, 30),
    ]
    assert state_at(store, tmp_path / "x", Until(index=LogIndex(27))) == at(node.log, 27)


def test_shipper_that_was_killed_after_a_backup_stores_the_log_before_it_too(
    tmp_path: Path, store: BackupStore
) -> None:
    node, shipper = backed_up(tmp_path, store)
    node.applied = 20
    shipper.step()
    node.applied = 25
    node.grow()
    BackupRun(cast("TimerClient", node), store, patience_s=0).take()
    node.applied = 30
    again = Shipper(node, store)
    again.step()
    assert again.told == gaps_of(store) == []
    assert state_at(store, tmp_path / "x", Until(index=LogIndex(23))) == at(node.log, 23)
    assert state_at(store, tmp_path / "y", Until()) == at(node.log, 30)


def test_log_goes_on_without_a_gap_when_the_disk_of_the_store_was_away(
    tmp_path: Path, store: BackupStore
) -> None:
    node, shipper = backed_up(tmp_path, store)
    root, away = Path(store.root), tmp_path / "away"
    node.applied = 15
    shipper.step()
    root.rename(away)
    for entry in 20, 25:
        node.applied = entry
        shipper.step(100)  # a backup is due
        assert shipper.shipper._running is None
        root.mkdir(exist_ok=True)  # where the disk is not mounted
    assert [*root.iterdir()] == []
    assert shipper.told == [f"{root}: it has no backup now: is its disk mounted?; trying again"]
    root.rmdir()
    away.rename(root)
    shipper.step()
    assert shipper.told[1:] == ["the log goes on"]
    assert state_at(store, tmp_path / "x", Until()) == at(node.log, 25)


def test_backup_ends_when_the_disk_of_the_store_is_away(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, shipper = backed_up(tmp_path, store)
    root, opened = Path(store.root), node.open_backup

    def open_backup(*words: Any, **more: Any) -> pb.OpenBackupResponse:
        root.rename(tmp_path / "away")
        shipper.shipper._attempt("log", shipper.shipper._ship)
        return opened(*words, **more)

    monkeypatch.setattr(node, "open_backup", open_backup)
    shipper.back_up()
    assert [each for each in root.rglob("*") if each.is_file()] == []
    assert shipper.done == [10]


def test_backup_by_a_clock_that_was_ahead_does_not_delay_the_next_one(
    tmp_path: Path, store: BackupStore
) -> None:
    node, _ = backed_up(tmp_path, store)  # on the clock of this machine, far ahead of the next
    shipper = Shipper(node, store)
    shipper.step()
    shipper.step(100)
    assert shipper.shipper._running is not None


def test_gap_is_told_and_a_new_backup_begins_behind_it(tmp_path: Path, store: BackupStore) -> None:
    node, shipper = backed_up(tmp_path, store)
    node.applied = 30
    node.grow()
    node.files.drop_before(LogIndex(29))
    kept = node.files.first_index
    assert kept > 11
    shipper.step()
    [told] = shipper.told
    assert told == (
        "gap in the log: no node that answers has entry 11; the next backup begins at once"
    )
    shipper.step()
    assert shipper.shipper._running is not None
    shipper.shipper._running.exception()
    node.applied = 33
    shipper.step()
    assert shipper.done == [10, 30]
    log = stored(store)
    old, new = read_catalogues(store)
    assert log.reach(old.end) is None
    reach = log.reach(new.end)
    assert reach is not None
    assert reach.last == 33
    with pytest.raises(BackupError, match="the log has a gap: entry 11 is missing"):
        state_at(store, tmp_path / "z", Until(index=LogIndex(29)))
    assert state_at(store, tmp_path / "x", Until(index=LogIndex(10))) == at(node.log, 10)
    assert state_at(store, tmp_path / "y", Until(index=LogIndex(32))) == at(node.log, 32)


def test_log_of_a_restored_cluster_goes_on_in_the_same_store(
    tmp_path: Path, store: BackupStore
) -> None:
    old, shipper = backed_up(tmp_path / "old", store)
    old.applied = 30
    shipper.step()
    log = first(old.log, 10)
    log.epoch = 1 << 20
    log.begin_epoch()
    for name in "uvwxyz":
        log.topic(name)
    new = Shipped(tmp_path / "new", applied=12, log=log)
    again = Shipper(new, store)
    again.step()  # the new log has no entry 30
    assert len(again.told) == 1
    assert re.match(r"gap in the log: entry 30 of epoch \d is not in the cluster's", again.told[0])
    again.step()
    again.back_up()
    new.applied = 15
    again.step()
    assert [each.index for each in read_catalogues(store)] == [10, 12]
    assert state_at(store, tmp_path / "x", Until()) == at(log, 15)
    assert state_at(store, tmp_path / "y", Until(index=LogIndex(11))) == at(old.log, 11)
    # A shipper of the old cluster would find the log of the new one.
    new.applied = len(log.entries)
    again.shipper._end = LogEnd(LogIndex(14), Epoch(3))
    again.step()
    assert "entry 14 of epoch 3 is not in the cluster's log" in again.told[1]


@pytest.mark.parametrize("harm", ["missing", "cut", "changed"])
def test_damaged_part_of_the_log_is_named_and_no_shorter_state_is_restored(
    tmp_path: Path, store: BackupStore, harm: str
) -> None:
    node, shipper = backed_up(tmp_path, store)
    node.applied = 20
    shipper.step()
    node.applied = 30
    shipper.step()
    [sound, part] = stored(store).parts
    path = tmp_path / "store" / stored(store).folder / part.name
    data = path.read_bytes()
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"missing": b"", "cut": data[:-1], "changed": changed}[harm])
    [told] = damages_of(store)[1]
    assert part.name in told
    with pytest.raises(BackupError, match=part.name):
        state_at(store, tmp_path / "x", Until())
    assert state_at(store, tmp_path / "y", Until(index=sound.last)) == at(node.log, 20)
    # As docs/backup.md says: without the file, the states before it can be restored.
    path.unlink()
    assert damages_of(store)[1] == []
    assert state_at(store, tmp_path / "z", Until()) == at(node.log, 20)


def test_prune_keeps_the_log_since_the_oldest_backup_that_is_kept(
    tmp_path: Path, store: BackupStore
) -> None:
    node = Shipped(tmp_path, applied=5)
    shipper = Shipper(node, store, keep=2)
    shipper.step()
    for applied in (5, 20, 30):
        node.applied = applied
        node.grow()
        shipper.back_up()
    assert shipper.done == [5, 20, 30]
    assert [each.index for each in read_catalogues(store)] == [20, 30]
    assert [part.last for part in stored(store).parts] == [30]
    prune(store, 1)
    assert stored(store).parts == []
    assert state_at(store, tmp_path / "x", Until()) == at(node.log, 30)


def test_trouble_is_told_once_and_another_node_is_asked(tmp_path: Path, store: BackupStore) -> None:
    node = Shipped(tmp_path, applied=10)
    shipper = Shipper(node, store)
    node.reachable = False
    for _ in range(3):
        shipper.step()
    assert shipper.told == ["no node answers; trying again"]
    node.reachable = True
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(node, "status", lambda: pb.GetStatusResponse(cluster_id="c"))
        shipper.step()
        assert shipper.told[1:] == ["no node answers with a status; trying again"]
    shipper.step()
    assert shipper.told[2:] == ["the log goes on"]
    assert {name for name, _, claimed in node.asked if not claimed} == {"n1"}, "a follower"
    shipper.back_up()
    shipper.step(QUIET_S)  # the follower returns nothing new: another one may have more
    assert ("n2", 10) in {(name, after) for name, after, _ in node.asked}
    opened = os.open

    def full(path: str, flags: int, *more: int, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "no space left", path)
        return opened(path, flags, *more, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", full)
        for node.applied in (18, 19, 20):  # the name of the part has its last entry
            shipper.step()
    assert len(shipper.told) == 4
    assert re.search("no space left: .*; trying again", shipper.told[3])
    shipper.step()
    assert state_at(store, tmp_path / "x", Until()) == at(node.log, 20)


def test_idle_cluster_fills_no_store_with_small_parts(tmp_path: Path, store: BackupStore) -> None:
    log = Log()
    log.begin_epoch()
    log.topic("a")
    for _ in range(30):
        log.checkpoint()
    node, shipper = backed_up(tmp_path, store, applied=2, log=log)
    parts = len(stored(store).parts)
    for applied in range(3, 33):
        node.applied = applied
        shipper.step(IDLE_PART_S / 10)
    assert len(stored(store).parts) - parts in {2, 3}


def test_stores_and_answers_of_other_clusters_end_the_shipper(
    tmp_path: Path, store: BackupStore
) -> None:
    node, shipper = backed_up(tmp_path, store)
    node.cluster_id = "d"
    with pytest.raises(WrongStore, match="cluster 'd' answers, not 'c'"):
        shipper.step()
    with pytest.raises(WrongStore, match="has backups of cluster 'c', this is cluster 'd'"):
        Shipper(node, store).step()


def test_backup_that_fails_is_tried_again_and_a_stop_ends_it(
    tmp_path: Path, store: BackupStore
) -> None:
    node = Shipped(tmp_path, applied=10)
    shipper = Shipper(node, store)
    node.left = 0
    shipper.step()
    shipper.back_up()
    assert "closed the backup" in shipper.told[0]
    node.left = None
    shipper.step(RETRY_S)
    assert shipper.shipper._running is not None
    shipper.shipper._running.exception()
    shipper.step()
    assert shipper.done == [10]
    shipper.shipper.stop()
    shipper.shipper.run()
    run = BackupRun(cast("TimerClient", node), store, stopped=lambda: True)
    with pytest.raises(BackupError, match="the backup was stopped"):
        run.take()


def test_backup_of_a_node_that_leaves_the_cluster_is_tried_again(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipper = Shipper(Shipped(tmp_path, applied=10), store)
    with monkeypatch.context() as patched:
        gone = Mock(side_effect=NotFound("no such node: 'n1'"))
        patched.setattr(Shipped, "open_backup", gone)
        shipper.step()
        shipper.back_up()
    assert "no such node" in shipper.told[0]
    shipper.step(RETRY_S)
    shipper.back_up()
    assert shipper.done == [10]


def test_list_and_restore_show_how_far_the_log_reaches(
    tmp_path: Path, store: BackupStore, capsys: pytest.CaptureFixture[str]
) -> None:
    node, shipper = backed_up(tmp_path, store)
    assert timerctl(["backup", "list", "--from", store.root]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[3:5] == ["-", "-"]
    node.applied = 30
    shipper.step()
    assert timerctl(["backup", "list", "--from", store.root, "-o", "json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)["backups"]
    assert (listed["index"], listed["log_index"]) == (10, 30)
    assert listed["log_time_ms"] == node.log.entries[29].time_ms
    words = ["restore", "--from", store.root, "--at-index", "25", "--into", str(tmp_path / "new")]
    assert timerctl(words) == 0
    told = capsys.readouterr().out
    assert "and 15 entries of the log after it: cluster c at log index 25, " in told
    engine = engine_on(DISK, tmp_path / "new" / "n1" / "state")
    assert state_of(engine.machine) == at(node.log, 25)
    words[-1] = str(tmp_path / "plain")
    assert timerctl([*words[:3], "--backup", listed["backup"], *words[5:]]) == 0
    assert "cluster c at log index 10, " in capsys.readouterr().out
    assert timerctl(["backup", "--into", store.root, "--log-every", "1s"]) == 2
    assert "--log-every goes with --follow" in capsys.readouterr().err
    assert timerctl(["backup", "--into", store.root, "--follow", "--log-every", "0"]) == 2
    assert "--log-every 0: must be more than 0" in capsys.readouterr().err


async def test_node_keeps_the_log_for_a_minute_after_the_shippers_asked(tmp_path: Path) -> None:
    node = Shipped(tmp_path, applied=20)
    shipping = node.shipping

    def kept() -> list[int | None]:
        return [shipping.needed_from, shipping.stored_index, shipping.stored_ms]

    async def asked(stored: int, shipper: int) -> None:
        await shipping.fetch(LogIndex(10), LogIndex(stored), shipper)

    assert kept() == [None, 0, 0]
    await asked(0, 1)
    assert kept() == [None, 0, 0], "no store is known to follow"
    await asked(7, 1)
    assert kept() == [8, 7, START_MS]
    await asked(1 << 40, 1)
    assert kept() == [8, 7, START_MS], "no store has entries that there are not"
    node.wall_ms += 5
    await asked(9, 2)
    await asked(7, 1)
    assert kept() == [8, 7, START_MS], "the store that is behind, and does not move"
    node.mono_ms = PINNED_MS - 1
    await asked(10, 2)
    assert kept() == [8, 7, START_MS]
    node.mono_ms += 1
    assert kept() == [11, 10, START_MS + 5]
    node.mono_ms += PINNED_MS
    assert kept() == [None, 10, START_MS + 5]


async def test_leader_that_applies_before_its_own_log_is_written_returns_what_is_written(
    tmp_path: Path,
) -> None:
    node = Shipped(tmp_path, applied=20)
    node.applied = len(node.log.entries) + 1
    found = await node.shipping.fetch(LogIndex(len(node.log.entries)))
    assert (found.applied[0], found.frames) == (len(node.log.entries), b"")


def test_another_node_has_the_entry_that_the_asked_one_dropped(
    tmp_path: Path, store: BackupStore
) -> None:
    node, shipper = backed_up(tmp_path, store)
    node.dropped, node.silent, node.applied = {"n1"}, {"n2"}, 20
    shipper.step()
    [told] = shipper.told
    assert told == "no node that answers has entry 11; n2 may have it; trying again"
    shipper.step(GAP_S - 1)
    node.silent = set()
    shipper.step()
    assert shipper.told[1:] == ["the log goes on"]
    assert state_at(store, tmp_path / "x", Until()) == at(node.log, 20)
    node.dropped, node.silent, node.applied = {"n2"}, {"n1"}, 30
    shipper.step()
    shipper.step(GAP_S)
    assert shipper.told[3:] == [
        "gap in the log: no node that answers has entry 21; the next backup begins at once"
    ]


def test_unknown_node_of_the_command_line_ends_the_shipper(
    tmp_path: Path, store: BackupStore
) -> None:
    shipper = Shipper(Shipped(tmp_path, applied=10), store, node="n9")
    with pytest.raises(NotFound, match="no such node: 'n9'"):
        shipper.step()


def test_prune_that_fails_is_told_and_begins_no_backup(tmp_path: Path, store: BackupStore) -> None:
    node = Shipped(tmp_path, applied=10)
    shipper = Shipper(node, store, keep=1)
    (tmp_path / "store/backups").mkdir(parents=True)
    (tmp_path / "store/backups/damaged.json").write_text("{}")
    shipper.step()
    shipper.back_up()
    assert shipper.done == [10]
    assert shipper.shipper._pruning is not None
    shipper.shipper._pruning.exception()
    for _ in range(5):
        shipper.step(RETRY_S)
    [told] = shipper.told
    assert "damaged.json: not a catalogue" in told
    assert shipper.shipper._running is None


def test_hole_in_the_log_is_reported_and_no_shorter_state_is_restored_unasked(
    tmp_path: Path, store: BackupStore, capsys: pytest.CaptureFixture[str]
) -> None:
    node, shipper = backed_up(tmp_path, store)
    for applied in (15, 20, 30):
        node.applied = applied
        shipper.step()
    assert gaps_of(store) == []
    lost = stored(store).parts[1]
    (tmp_path / "store" / stored(store).folder / lost.name).unlink()
    words = ["restore", "--from", store.root, "--into", str(tmp_path / "new")]
    for wish in ([], ["--at-index", "25"], ["--at-index", "17"]):
        assert timerctl([*words, *wish]) == 1
        told = capsys.readouterr().err
        assert (
            "the log has a gap: entry 16 is missing, and the next one is 21; --at-index 15" in told
        )
    assert timerctl([*words, "--at-index", "15"]) == 0
    capsys.readouterr()
    assert timerctl(["backup", "verify", "--from", store.root]) == 0
    assert "gap in the log: entries 16 to 20 are missing" in capsys.readouterr().out


def test_index_of_a_backup_is_restored_though_the_log_after_it_is_damaged(
    tmp_path: Path, store: BackupStore
) -> None:
    node, shipper = backed_up(tmp_path, store)
    node.applied = 20
    shipper.step()
    [part] = stored(store).parts
    path = tmp_path / "store" / stored(store).folder / part.name
    whole = path.read_bytes()
    path.write_bytes(b"")
    assert state_at(store, tmp_path / "x", Until(index=LogIndex(10))) == at(node.log, 10)
    # Another shipper has written the same entries.
    (path.parent / part.name.replace(f"-{part.time_ms}-", f"-{part.time_ms - 1}-")).write_bytes(
        whole
    )
    assert state_at(store, tmp_path / "y", Until()) == at(node.log, 20)


def test_prune_keeps_a_part_that_begins_before_the_oldest_backup(
    tmp_path: Path, store: BackupStore
) -> None:
    node, shipper = backed_up(tmp_path, store, applied=5)
    node.applied = 20
    node.grow()
    node.applied = 25
    shipper.back_up()
    assert shipper.done == [5, 20]
    prune(store, 1)
    assert [(part.first, part.last) for part in stored(store).parts] == [(6, 25)]
    assert state_at(store, tmp_path / "x", Until()) == at(node.log, 25)


def test_two_clusters_in_a_new_store_do_not_mix_their_logs(
    tmp_path: Path, store: BackupStore
) -> None:
    one, other = Shipped(tmp_path / "1", applied=10), Shipped(tmp_path / "2", applied=12)
    other.cluster_id, other.left = "d", 0
    shipper, second = Shipper(one, store), Shipper(other, store)
    second.step()
    assert second.shipper._running is not None
    second.shipper._running.exception()  # it fails before the other's is complete
    shipper.step()
    one.applied = other.applied = 20
    shipper.step()
    second.step()
    shipper.back_up()
    assert [part.last for part in stored(store).parts] == [20]

    def go_on() -> None:
        for _ in range(3):
            second.back_up()

    with pytest.raises(WrongStore, match="has backups of cluster"):
        go_on()
    assert [part.last for part in StoredLog(store, "d").parts] == [20], "by itself"


def test_parts_of_two_logs_are_told_apart_by_their_epochs(store: BackupStore) -> None:
    """Both logs have entries 1 to 6 of epoch 1; then epoch 3 of the old, 2 of the new one."""
    logs = {}
    for epoch, later_ms in ((3, 0), (2, 1_000)):
        log = Log()
        for _ in range(6):
            log.checkpoint()
        log.epoch, log.now_ms = epoch, START_MS + later_ms
        for _ in range(6):
            log.checkpoint()
        logs[epoch] = log.entries
    old, new = logs[3], logs[2]

    def write(entries: list[Entry], begin: int, end: int) -> None:
        before = Epoch(entries[begin - 2].epoch if begin > 1 else 0)
        frames = b"".join(map(frame_of, entries[begin - 1 : end]))
        write_part(
            store,
            stored(store).folder,
            LogEnd(LogIndex(begin - 1), before),
            entries[end - 1],
            frames,
        )

    def read(index: int, epoch: int) -> list[int]:
        end = LogEnd(LogIndex(index), Epoch(epoch))
        found = [entry for entries in stored(store).after(end) for entry in entries]
        reach = stored(store).reach(end)
        assert (reach is None and not found) or reach.end.index == found[-1].index  # type: ignore[union-attr]
        assert [entry.index for entry in found] == [*range(index + 1, index + 1 + len(found))]
        return [entry.epoch for entry in found]

    write(old, 1, 8)
    write(old, 9, 12)
    assert read(6, 1) == [3] * 6
    assert read(7, 2) == [], "the part has entry 7 of another epoch"
    assert read(8, 2) == []
    write(old, 7, 10)
    write(new, 7, 10)
    write(new, 11, 12)
    assert read(6, 1) == [2] * 6, "of two logs, that with the latest entry"
    assert read(0, 0) == [1] * 6 + [3] * 6
    assert read(8, 3) == [3] * 4
    assert read(8, 2) == [2] * 4
    assert read(10, 3) == [3] * 2
    assert read(10, 2) == [2] * 2
    assert read(12, 2) == read(12, 3) == read(20, 2) == []


def test_frames_that_do_not_follow_are_refused(store: BackupStore) -> None:
    log = Log()
    for _ in range(3):
        log.checkpoint()
    frames = [frame_of(entry) for entry in log.entries]
    begin = LogEnd(LogIndex(0), Epoch(0))
    assert len(entries_after(begin, b"".join(frames), "here")) == 3
    with pytest.raises(
        BackupError, match="here: entry 3 of epoch 1 does not follow entry 1 of epoch 1"
    ):
        entries_after(begin, frames[0] + frames[2], "here")
    with pytest.raises(BackupError, match="does not follow entry 0 of epoch 5"):
        entries_after(LogEnd(LogIndex(0), Epoch(5)), frames[0], "here")
    with pytest.raises(BackupError, match="here has no entry"):
        entries_after(begin, b"", "here")
    part = write_part(store, stored(store).folder, begin, log.entries[1], b"".join(frames))
    with pytest.raises(BackupError, match="damaged: it ends with entry 3"):
        stored(store).read(part)


def test_wish_is_reached_by_the_part_after_which_no_entry_is_wished() -> None:
    ends = LogIndex(5), LogIndex(9), Epoch(1), Epoch(1)
    part = LogPart(*ends, UnixMs(1_000), 100)
    by_index = [Until(index=LogIndex(index)).is_reached(part) for index in (8, 9, 10)]
    by_time = [Until(time_ms=UnixMs(ms)).is_reached(part) for ms in (999, 1_000, 1_001)]
    assert (by_index, by_time) == ([True, True, False], [True, False, False])
    assert not Until().is_reached(part)


def test_two_restores_from_one_backup_have_different_epochs(
    tmp_path: Path, store: BackupStore
) -> None:
    backed_up(tmp_path, store)
    [found] = read_catalogues(store)
    epochs = {plan_of(found, restore_id=str(number)).epoch for number in range(20)}
    assert len(epochs) == 20
    assert min(epochs) > found.epoch + (1 << 20)


async def test_damage_that_a_shipper_meets_is_healed_by_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Shipped(tmp_path, applied=20)
    damage = UnreadableFileError("log", 3, "EIO")

    def fails(*_: object) -> list[memoryview]:
        raise damage

    monkeypatch.setattr(node.files, "read", fails)
    with pytest.raises(NotReadyError, match="this node has damaged files: log: corrupt at byte 3"):
        await node.shipping.fetch(LogIndex(5), LogIndex(0))
    assert node.damages == [damage]
