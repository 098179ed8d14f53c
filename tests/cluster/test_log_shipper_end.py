"""Continuous backups without processes: nodes and stores that are away, and the end."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.api import log_shipping
from cluster.backup import backup_store, log_shipper, pin_keeper
from cluster.backup.backup_store import BackupError, BackupStore, StoreUnavailable
from cluster.backup.catalogue import read_catalogues
from cluster.backup.roll_forward import Until
from cluster.backup.store_care import gaps_of
from tests.cluster.running import until
from tests.cluster.shipping import Shipped, Shipper, at, backed_up, first, state_at, stored
from tests.timer.machines import START_MS
from timer.model.units import LogIndex
from timer.recovery.snapshot_source import PINNED_MS
from timerclient.cli.timerctl import main as timerctl
from timerclient.values.errors import Unavailable


def test_silent_node_is_not_waited_for_and_is_told_again_later(
    tmp_path: Path, store: BackupStore
) -> None:
    node = Shipped(tmp_path, applied=10)
    shipper = Shipper(node, store)
    shipper.step()

    def asked() -> set[str]:
        node.asked.clear()
        shipper.shipper.keep_log()
        return {name for name, *_ in node.asked}

    assert asked() == {"n1", "n2"}
    node.absent = {"n2"}
    assert asked() == {"n1"}
    node.absent = set()
    assert asked() == {"n1", "n2"}
    node.silent = {"n1"}
    assert asked() == {"n2"}


def test_all_nodes_are_told_how_far_the_store_is(tmp_path: Path, store: BackupStore) -> None:
    node = Shipped(tmp_path, applied=10)
    shipper = Shipper(node, store)
    shipper.step()
    node.applied = 20
    shipper.step()
    node.asked.clear()
    shipper.shipper.keep_log()
    assert ("n2", 20) in {(name, claimed) for name, _, claimed in node.asked}
    shipper.back_up()
    node.asked.clear()
    Shipper(node, store).step()
    assert {("n1", 20), ("n2", 20)} <= {(name, claimed) for name, _, claimed in node.asked}


async def test_shipper_that_begins_is_no_progress_of_its_store(tmp_path: Path) -> None:
    node = Shipped(tmp_path, applied=37)
    node.wall_ms = START_MS + 60_000
    ids = iter(range(1, 9))

    async def stored_ms(stored: int) -> int:
        node.mono_ms += PINNED_MS
        await node.shipping.fetch(LogIndex(1 << 40), LogIndex(stored), next(ids))
        return node.shipping.stored_ms

    lacking_ms = node.log.entries[33].time_ms
    assert START_MS < lacking_ms < node.wall_ms
    assert [await stored_ms(33), await stored_ms(33)] == [lacking_ms, lacking_ms]
    assert await stored_ms(37) == node.wall_ms, "the store has all"
    node.files.drop_before(LogIndex(30))
    assert node.files.first_index > 11, "the entry that the store lacks is gone"
    assert await stored_ms(10) == node.log.entries[node.files.first_index - 1].time_ms == START_MS


def test_nodes_keep_the_log_while_a_call_of_the_store_lasts(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, shipper = backed_up(tmp_path, store)
    monkeypatch.setattr(pin_keeper, "KEEP_S", 0.001)

    def hangs(*_: Any) -> None:
        node.asked.clear()
        wanted = {("n1", 10), ("n2", 10)}
        until(lambda: wanted <= {(name, claimed) for name, _, claimed in node.asked})
        shipper.shipper.stop()
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(store, "put", hangs)
    node.applied = 20
    with pytest.raises(StoreUnavailable, match="no answer"):
        shipper.shipper.run()


def test_trouble_of_a_store_is_told_once_though_each_message_is_another_one(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, shipper = backed_up(tmp_path, store)
    busy = "AWS Error SLOW_DOWN: Reduce it. (Request ID: A{0}, Extended Request ID: {0}=)"
    for message, lines in ((busy, 1), ("error {}", log_shipper.CAUSES_MAX)):
        errors = [OSError(message.format(number)) for number in range(30)]
        node.applied += 5
        with monkeypatch.context() as patched:
            patched.setattr(backup_store, "create_file", Mock(side_effect=errors))
            for _ in errors:
                shipper.step()
        assert len(shipper.told) == lines
        shipper.step()
        assert shipper.told.pop() == "the log goes on"
        shipper.told.clear()


def test_node_that_came_back_has_the_entry_that_all_others_dropped(
    tmp_path: Path, store: BackupStore
) -> None:
    node = Shipped(tmp_path, applied=10)
    shipper = Shipper(node, store)
    node.absent = {"n2"}
    shipper.step()
    shipper.back_up()
    node.absent = set()
    node.dropped, node.applied = {"n1"}, 20
    shipper.step()
    assert shipper.told == []
    assert [part.last for part in stored(store).parts] == [20]


def test_stop_waits_for_a_leader_and_ships_the_last_entries(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Shipped(tmp_path, applied=10)
    shipper = Shipper(node, store, patience_s=1.0)
    shipper.step()
    assert shipper.shipper._running is not None
    shipper.shipper._running.exception()
    node.applied = node.committed = 20
    node.serving = False
    elected = Mock(sleep=lambda _: setattr(node, "serving", True))
    monkeypatch.setattr(log_shipper, "time", elected)
    shipper.shipper.stop()
    shipper.shipper.run()
    assert shipper.done == [10], "complete meanwhile"
    assert state_at(store, tmp_path / "x", Until()) == at(node.log, 20)


def test_stop_does_not_wait_for_entries_that_are_committed_later(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, shipper = backed_up(tmp_path, store)
    monkeypatch.setattr(log_shipping, "CHUNK_SIZE", 1)
    monkeypatch.setattr(log_shipper, "PART_BYTES", 1)
    monkeypatch.setattr(log_shipper, "PARTS_AT_ONCE", 1)
    node.committed, node.applied = 12, 20  # as if the log grew faster than it is shipped
    shipper.shipper.stop()
    shipper.shipper.run()
    assert [part.last for part in stored(store).parts] == [11, 12]


def test_stop_ends_a_prune(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Shipped(tmp_path, applied=5)
    shipper = Shipper(node, store, keep=1)
    shipper.step()
    shipper.back_up()
    node.applied = 20
    node.grow()
    there, delete = store.sizes("parts"), BackupStore.delete

    def stopped(store: BackupStore, name: str) -> None:
        delete(store, name)
        shipper.shipper.stop()

    monkeypatch.setattr(BackupStore, "delete", stopped)
    shipper.back_up()
    assert shipper.done == [5, 20]
    assert shipper.shipper._pruning is not None
    with pytest.raises(BackupError, match="stopped; the next run continues"):
        shipper.shipper._pruning.result()
    assert [each.index for each in read_catalogues(store)] == [20]
    assert there.items() <= store.sizes("parts").items()
    shipper.shipper.run()


def test_stop_fails_if_the_store_lacks_entries(tmp_path: Path, store: BackupStore) -> None:
    node = Shipped(tmp_path, applied=10)

    def stopped(*, begun: bool = True) -> None:
        shipper = Shipper(node, store)
        if begun:
            shipper.step()
        shipper.shipper.stop()
        shipper.shipper.run()

    with pytest.raises(BackupError, match="follows no complete backup"):
        stopped(begun=False)
    one = Shipper(node, store)
    one.step()
    one.back_up()
    node.committed = 12  # no node has applied it
    with pytest.raises(Unavailable, match="n2 lacks entries up to 12"):
        stopped()
    node.reachable = False
    with pytest.raises(Unavailable, match="no node answers"):
        stopped()
    node.reachable, node.applied, node.dropped = True, 12, {"n1", "n2"}
    with pytest.raises(BackupError, match="gap in the log: no node that answers has entry 11"):
        stopped(begun=False)
    with pytest.raises(BackupError, match="follows no complete backup"):
        stopped()  # the new one is cut


def test_list_aligns_the_end_of_the_log_of_all_backups(
    tmp_path: Path, store: BackupStore, capsys: pytest.CaptureFixture[str]
) -> None:
    node, shipper = backed_up(tmp_path, store)
    node.applied = 20
    node.grow()
    shipper.step()
    shipper.back_up()
    assert timerctl(["backup", "list", "--from", store.root]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    end = heads.index("LOG TO INDEX") + len("LOG TO INDEX")
    assert [row[end - 3 : end] for row in rows] == [" 20", "  -"]


def test_restore_to_an_earlier_index_is_no_gap(tmp_path: Path, store: BackupStore) -> None:
    old, shipper = backed_up(tmp_path / "old", store)
    old.applied = 30
    shipper.step()
    log = first(old.log, 20)
    log.epoch, log.now_ms = 1 << 20, old.log.now_ms + 1
    log.begin_epoch()
    for number in range(20):
        log.topic(f"new{number}")
    new = Shipped(tmp_path / "new", applied=22, log=log)
    again = Shipper(new, store)
    again.step()
    again.step()
    again.back_up()
    for applied in (32, 40):
        new.applied = applied
        again.step()
    assert [part.first for part in stored(store).parts] == [11, 23, 33]
    assert gaps_of(store) == []
    assert state_at(store, tmp_path / "x", Until()) == at(log, 40)


def test_restore_to_an_index_before_the_end_of_the_stored_log_is_a_gap_at_any_epoch(
    tmp_path: Path, store: BackupStore
) -> None:
    def restored(name: str, epoch: int, applied: int, later_ms: int) -> Shipped:
        log = first(old.log, 10)
        log.epoch, log.now_ms = epoch, old.log.now_ms + later_ms
        log.begin_epoch()
        for number in range(20):
            log.topic(f"{name}{number}")
        return Shipped(tmp_path / name, applied=applied, log=log)

    old, _ = backed_up(tmp_path / "old", store)
    abandoned = Shipper(restored("abandoned", 1 << 30, applied=30, later_ms=1), store)
    abandoned.step()
    abandoned.back_up()
    abandoned.step()
    new = restored("new", 1 << 20, applied=12, later_ms=1_000)
    new.committed, new.serving = 12, False
    early = Shipper(new, store)
    early.shipper.stop()
    with pytest.raises(Unavailable, match="no serving leader"):  # which has all of the log
        early.shipper.run()
    new.serving = True
    told = "entry 30 of epoch 1073741825 is not in the cluster's log"
    early = Shipper(new, store)
    early.shipper.stop()
    with pytest.raises(BackupError, match=told):
        early.shipper.run()
    again = Shipper(new, store)
    again.step()
    assert told in again.told[0]
    again.step()
    again.back_up()
    new.applied = new.committed = 14
    again.shipper.stop()
    again.shipper.run()
    assert state_at(store, tmp_path / "x", Until()) == at(new.log, 14)


def test_node_that_lags_is_no_gap_and_a_status_from_before_proves_nothing(
    tmp_path: Path, store: BackupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Shipped(tmp_path, applied=10)
    node.serving, node.committed = True, 10
    shipper = Shipper(node, store)
    shipper.step()
    shipper.back_up()
    node.applied = node.committed = 20
    with monkeypatch.context() as patched:  # the shipper still has the status of index 10
        patched.setattr(Shipped, "status", Mock(side_effect=Unavailable("no node answers")))
        shipper.step()
        node.applied = 15
        shipper.step()
    shipper.step(log_shipper.COMPARE_S)
    assert shipper.told == []
    node.committed = 15
    shipper.step(log_shipper.COMPARE_S)
    assert "entry 20 of epoch" in shipper.told[0]
