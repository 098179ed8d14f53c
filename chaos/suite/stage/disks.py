"""A disk for each node: an ext4 file system in a file, mounted at the node's folder.

    RUN/nodes/n1.img   the disk, sparse       RUN/nodes/n1/   its mount point

Unsynced bytes survive kill -9, because they are in the page cache. With a disk for each node, the
power of one node alone can fail. The file system is shut down without a flush, by FS_IOC_SHUTDOWN
as in file system tests, then unmounted and mounted again. The mount replays its journal: synced
data is there and unsynced data is gone, as after a real power cut. A ballast file fills the disk.

At the end of a run the files move out of the disk into the folder of its mount point.
"""

import contextlib
import fcntl
import os
import re
import shutil
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chaos.suite.stage.network import NetworkError, run

SIZE: Final = 4 << 30
"""Of a disk, in bytes. The file is sparse, so it takes only the room of the written blocks."""
UNMOUNT_S: Final = 5.0
UNMOUNT_POLL_S: Final = 0.1
_SHUTDOWN: Final = 0x8004587D
_WITHOUT_FLUSH: Final = 2
_BALLAST: Final = "ballast"
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def probe(folder: Path) -> None:
    """Make a disk in `folder`, cut its power and remove it; NetworkError, OSError: it can't be."""
    disk = MountedDisk(folder / "probe")
    try:
        disk.make()
        disk.cut_power()
    finally:
        if os.path.ismount(disk.path):
            run("umount", str(disk.path))
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class MountedDisk:
    """One node's disk. End the node before the disk is unmounted."""

    path: Path
    """The mount point."""

    @property
    def image(self) -> Path:
        """The file that contains the file system."""
        return self.path.with_name(self.path.name + ".img")

    def make(self) -> None:
        """Make the image, format it and mount it."""
        self.path.mkdir(parents=True)
        with self.image.open("xb") as file:
            file.truncate(SIZE)
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard", str(self.image))
        self.mount()

    def mount(self) -> None:
        """Mount the disk."""
        run("mount", "-o", "loop", str(self.image), str(self.path))

    def cut_power(self) -> None:
        """Lose all unsynced bytes, and mount the disk again as at the start of a machine.

        No process may have a file of the disk open at this time. So call `shut_down` while the node
        still runs, end the node, then call `cut_power`.
        """
        self.shut_down()
        self._unmount()
        self.mount()

    def _unmount(self) -> None:
        """Unmount the disk as soon as no process has a file of it open.

        Raises:
            NetworkError: a process still has one open after UNMOUNT_S.
        """
        deadline = time.monotonic() + UNMOUNT_S
        while True:
            try:
                run("umount", str(self.path))
            except NetworkError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(UNMOUNT_POLL_S)
            else:
                return

    def shut_down(self) -> None:
        """Stop all writes at once, without a flush. Every later operation on the disk fails."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(fd)

    def fill(self, leave: int = 0) -> None:
        """Fill the disk with ballast until about `leave` bytes are free."""
        with (self.path / _BALLAST).open("wb") as file:
            free = os.statvfs(self.path)
            size = free.f_bavail * free.f_frsize - leave
            while size > 0:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
                    size = 0 if leave else size
                except OSError:
                    size //= 2

    def drain(self) -> None:
        """Remove the ballast."""
        (self.path / _BALLAST).unlink(missing_ok=True)

    def move_out(self) -> None:
        """Replace the disk by a plain folder with its files, hard links included."""
        copy = self.path.with_name(self.path.name + ".out")
        shutil.rmtree(copy, ignore_errors=True)
        self.drain()
        with contextlib.suppress(OSError):
            (self.path / "lost+found").rmdir()
        run("cp", "-a", str(self.path), str(copy))
        try:
            self._unmount()
        except NetworkError:
            # The files are copied. A process that still has one open ends the mount with its end.
            run("umount", "--lazy", str(self.path))
        self.path.rmdir()
        copy.rename(self.path)
        self.image.unlink()


def mounted() -> list[MountedDisk]:
    """Return the mounted disks of all runs."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        where = Path(_OCTAL.sub(lambda octal: chr(int(octal[1], 8)), line.split()[1]))
        if where.parent.name == "nodes" and MountedDisk(where).image.exists():
            found.append(MountedDisk(where))
    return found
