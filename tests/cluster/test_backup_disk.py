"""Backups, restores and exports on disks that fail, and their commands when a signal ends them."""

import errno
import os
from pathlib import Path

import pytest

from cluster.backup.backup_store import BackupStore, StoreUnavailable


@pytest.fixture
def store(tmp_path: Path) -> BackupStore:
    return BackupStore(str(tmp_path / "store"))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("failing", [".tmp", "parts"])
def test_file_whose_sync_fails_is_deleted(
    store: BackupStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store.put("parts/a", [b"a"], 1)

    def fails(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(failing):
            raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreUnavailable, match="planted"):
        store.put("parts/b", [b"b"], 1)
    assert files(tmp_path) == ["a"]
