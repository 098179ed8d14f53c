"""Faults of a node's disk: the harness writes a file, and the node's process reads and obeys it.

    RUN/disk-faults/n1.json    the current fault, as `DiskFault`; absent: the disk is sound
    RUN/disk-faults/n1.met     written by the node when a call first met the fault

The nodes of a run are started by chaos/suite/stage/faulty_timerd.py. It puts this module between
the product and the system calls `write`, `writev`, `pwrite`, `pread`, `fsync` and `fdatasync`. All
code above these calls is the product's own.

    slow     syncs take longer
    hang     syncs, or all of these calls, do not return while the fault is on
    error    syncs, or writes, fail with EIO; or reads of one file, as of a bad sector
    tear     the next write to the log puts half of its bytes into the file; the process is killed

A fault affects only files below the node's data directory. It lasts until its file is removed, in
later processes of the node as well. A tear removes its file itself, so it happens once.
"""

import contextlib
import enum
import errno
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from timer.files.disk import RealDisk

POLL_S: Final = 0.01
FOLDER: Final = "disk-faults"


class Kind(enum.StrEnum):
    """Kinds of faults; see the module."""

    SLOW = "slow"
    HANG = "hang"
    ERROR = "error"
    TEAR = "tear"


class Calls(enum.StrEnum):
    """The system calls that a fault affects."""

    SYNCS = "syncs"
    WRITES = "writes"
    READS = "reads"
    ALL = "all"


_NAMES: Final = {
    Calls.SYNCS: ("fsync", "fdatasync"),
    Calls.WRITES: ("write", "writev", "pwrite"),
    Calls.READS: ("pread",),
}
_ALL: Final = [*itertools.chain(*_NAMES.values())]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFault:
    """One fault of one disk."""

    number: int
    """Of this fault among all faults of the run, from 1."""
    kind: Kind
    data: str
    """The node's data directory."""
    calls: Calls = Calls.SYNCS
    """The affected calls. A tear ignores this field: it affects `writev` to a log."""
    delay_ms: int = 0
    """Delay of a slow sync."""
    inode: int = 0
    """Of the only affected file. 0: any file."""

    def touches(self, call: str, path: str, inode: int) -> bool:
        """Return whether the fault affects this call on this file."""
        if not path.startswith(f"{self.data}/") or self.inode not in (0, inode):
            return False
        if self.kind == Kind.TEAR:
            return call == "writev" and path.endswith(".log")
        return call in _NAMES.get(self.calls, _ALL)


class DiskFaults:
    """The harness's side: it sets faults of nodes, and reads whether a call met them."""

    def __init__(self, root: Path) -> None:
        """`root`: the run's folder."""
        self._folder = root.resolve() / FOLDER
        self._numbers = itertools.count(1)
        self._on: dict[str, DiskFault] = {}

    @contextlib.contextmanager
    def on(self, name: str, data: Path, kind: Kind, **more: Any) -> Iterator[None]:
        """A node's disk has this fault in the block. `more` are other fields of DiskFault."""
        self._folder.mkdir(exist_ok=True)
        fault = DiskFault(number=next(self._numbers), kind=kind, data=str(data.resolve()), **more)
        self._on[name] = fault
        path = self._folder / f"{name}.json"
        RealDisk().write_atomic(path, json.dumps(asdict(fault)).encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def met(self, name: str) -> dict[str, Any] | None:
        """Return the first call that met the node's last fault: `number`, `call`, `path`.

        A tear adds `written` and `wanted`, in bytes. None: no call has met the fault yet.
        """
        with contextlib.suppress(FileNotFoundError):
            said: dict[str, Any] = json.loads((self._folder / f"{name}.met").read_text())
            if name in self._on and said["number"] == self._on[name].number:
                return said
        return None


class FaultyCalls:
    """The node's side: replacements for the system calls of `os`."""

    def __init__(self, path: Path) -> None:
        """`path`: the file with the fault."""
        self._path = path
        self._met = 0
        self._true: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Replace the calls in this process from here on."""
        for name in _ALL:
            self._true[name] = getattr(os, name)
            setattr(os, name, self._standing_in(name))

    def _standing_in(self, name: str) -> Callable[..., Any]:
        true = self._true[name]

        def call(fd: int, *args: Any) -> Any:
            fault = self._fault()
            if fault is not None:
                self._obey(fault, name, fd, args)
            return true(fd, *args)

        return call

    def _fault(self) -> DiskFault | None:
        """Return the current fault; None: the disk is sound."""
        try:
            os.stat(self._path)  # before each system call: without a fault this test is fastest
            said = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        return DiskFault(**said)

    def _obey(self, fault: DiskFault, name: str, fd: int, args: Sequence[Any]) -> None:
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
            inode = os.fstat(fd).st_ino
        except OSError:
            return  # the system call itself fails as well
        if not fault.touches(name, path, inode):
            return
        if fault.kind == Kind.TEAR:
            self._tear(fault, name, path, fd, args[0])
            return
        self._note(fault, name, path)
        if fault.kind == Kind.SLOW:
            time.sleep(fault.delay_ms / 1000)
        elif fault.kind == Kind.HANG:
            while self._fault() == fault:
                time.sleep(POLL_S)
        else:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _tear(
        self, fault: DiskFault, name: str, path: str, fd: int, buffers: Sequence[bytes]
    ) -> None:
        whole = b"".join(buffers)
        if len(whole) < 2:  # one byte can't be torn
            return
        half = self._true["write"](fd, whole[: len(whole) // 2])
        self._note(fault, name, path, written=half, wanted=len(whole))
        self._path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, fault: DiskFault, name: str, path: str, **more: int) -> None:
        """Write the file that tells the harness of the call; once per fault and process."""
        if self._met == fault.number:
            return
        self._met = fault.number
        met = self._path.with_suffix(".met")
        # Other threads and later processes may meet the fault: each replaces the whole file.
        other = met.with_name(f"{met.name}.{os.getpid()}.{time.monotonic_ns()}")
        other.write_text(json.dumps({"number": fault.number, "call": name, "path": path, **more}))
        other.rename(met)
