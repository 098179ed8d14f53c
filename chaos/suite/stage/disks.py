"""A disk for each node: an ext4 file system in a file, mounted where the node's data lies.

    RUN/nodes/n1.img   the disk, sparse       RUN/nodes/n1/   where it is mounted

What a process wrote and did not sync survives kill -9: it is in the page cache. With a disk of its
own the power can fail for one node alone: the file system is shut down without a flush (the
FS_IOC_SHUTDOWN that file system tests use), unmounted and mounted again. Its journal is replayed,
synced data is there, unsynced data is gone, as after a real power cut. A ballast file fills it.

At a run's end the files move out of the disk into the folder where it was mounted.
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
"""Of a disk. It is sparse: takes what was written."""
UNMOUNT_S: Final = 5.0
UNMOUNT_POLL_S: Final = 0.1
_SHUTDOWN: Final = 0x8004587D
_WITHOUT_FLUSH: Final = 2
_BALLAST: Final = "ballast"
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def why_not(folder: Path) -> str | None:
    """Return why this machine gives a node no disk of its own in `folder`; None: it does.

    What is left if this process dies meanwhile is found by `mounted` if the folder is `nodes`.
    """
    if os.geteuid() != 0:
        return "not root"
    probe = MountedDisk(folder / "probe")
    try:
        if probe.path.exists():  # a probe died here
            probe.path.rmdir()
            probe.image.unlink(missing_ok=True)
        probe.make()
        try:
            probe.cut_power()
        finally:
            run("umount", str(probe.path))
    except (NetworkError, OSError) as error:
        return str(error)
    finally:
        probe.image.unlink(missing_ok=True)
        if probe.path.exists():
            probe.path.rmdir()
    return None


@dataclass(frozen=True, slots=True)
class MountedDisk:
    """One node's disk. The node has ended whenever the disk is unmounted."""

    path: Path
    """Where it is, or will be, mounted."""

    @property
    def image(self) -> Path:
        """The file that it lies in."""
        return self.path.with_name(self.path.name + ".img")

    def make(self) -> None:
        """Format and mount it."""
        self.path.mkdir(parents=True)
        with self.image.open("xb") as file:
            file.truncate(SIZE)
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard", str(self.image))
        self.mount()

    def mount(self) -> None:
        """Mount it."""
        run("mount", "-o", "loop", str(self.image), str(self.path))

    def cut_power(self) -> None:
        """Lose what is not synced. Afterwards it is mounted again, as at the machine's start.

        Nothing may have a file open on it when it is unmounted: call `shut_down` first, while the
        node still runs, end the node, then call this.
        """
        self.shut_down()
        self._unmount()
        self.mount()

    def _unmount(self) -> None:
        """Unmount it, as soon as nobody has a file open on it.

        Raises:
            NetworkError: somebody has, for too long.
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
        """Stop all writing at once; every later operation on it fails."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(fd)

    def fill(self, leave: int = 0) -> None:
        """Leave so many bytes of room for anybody, about."""
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
        """Leave room again."""
        (self.path / _BALLAST).unlink(missing_ok=True)

    def move_out(self) -> None:
        """Unmount it and leave its files, hard links included, in the folder instead of it."""
        copy = self.path.with_name(self.path.name + ".out")
        shutil.rmtree(copy, ignore_errors=True)
        self.drain()
        with contextlib.suppress(OSError):
            (self.path / "lost+found").rmdir()
        run("cp", "-a", str(self.path), str(copy))
        try:
            self._unmount()
        except NetworkError:  # its files are out: who holds it open may end when he likes
            run("umount", "--lazy", str(self.path))
        self.path.rmdir()
        copy.rename(self.path)
        self.image.unlink()


def mounted() -> list[MountedDisk]:
    """Return the disks of all runs that are mounted now."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        where = Path(_OCTAL.sub(lambda octal: chr(int(octal[1], 8)), line.split()[1]))
        if where.parent.name == "nodes" and MountedDisk(where).image.exists():
            found.append(MountedDisk(where))
    return found
