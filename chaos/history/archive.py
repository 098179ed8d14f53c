"""The archive: hard links to every segment of the nodes' logs, so that none is lost to the audit.

    timerctl archive RUN_DIR                         a local cluster: into its nodes/NODE/kept
    timerctl archive --data DIR --into ARCHIVE       one node's data directory, on its machine

A node drops segments of its log once a manifest covers them and every voter has them. The audit
replays logs from their first entry. So the archive keeps a second link to every segment file, on
the same disk, and follows the changes of the log:

    a segment appears        it is linked
    the oldest is dropped    its link stays: entries below the first segment of a log are committed
    the end is truncated     links to segments that are gone above the first one are removed
    a segment is rewritten   it is linked again: another file has the same name
    all files are others     the log began again, after a wipe or a snapshot. A new life begins

    ARCHIVE/000/*.log      the first life of the log
    ARCHIVE/001/*.log      the second one: the node lost its log and got another
    ARCHIVE/SOURCE         the path of the log. LOCK is locked while the command follows it

A new segment is linked within POLL_S. It exists for longer, because a node drops only segments
below a manifest that it made later. The archive takes the room of the dropped segments only.
"""

import contextlib
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from chaos.history.history import OWNER, RunFolder
from timer.files import data_directory, segment
from timer.files.disk import RealDisk
from timer.model.timer_errors import EngineError
from timerspark.log.segment_files import lives, segments

POLL_S: Final = 0.25
SOURCE: Final = "SOURCE"


class Archive:
    """Follows the logs of a run in a thread of its own, until it is closed."""

    def __init__(self, logs: Mapping[str, tuple[Path, Path]]) -> None:
        """Start the thread. `logs`: node -> (folder of its log, folder of the archive)."""
        self._logs = dict(logs)
        self._lock = threading.Lock()
        self._left_out: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="archive", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._closed.wait(POLL_S):
            self.update()

    def update(self) -> None:
        """Bring the archives of all logs up to date."""
        with self._lock:
            for log, kept in (self._logs[node] for node in self._logs.keys() - self._left_out):
                # The folder is back later: its disk lost its power, or it was wiped.
                with contextlib.suppress(OSError):
                    follow(log, kept)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Follow no log during the block, so that a disk can be unmounted."""
        with self._lock:
            yield

    def seal(self, node: str) -> None:
        """Keep the present content of a node's log, and begin a new life for all later changes.

        Only the last segment is going to be damaged.
        """
        log, kept = self._logs[node]
        with self._lock:
            follow(log, kept)
            *_, life = lives(kept)
            last = max(life.iterdir())
            copy = last.with_suffix(".copy")
            shutil.copyfile(last, copy)
            copy.rename(last)
            _another(kept)

    @contextlib.contextmanager
    def sealed(self, node: str) -> Iterator[None]:
        """Keep what a running node's log holds now, and follow it again only afterwards.

        Its last segment is damaged meanwhile, while the node appends to it.
        """
        with self._lock:
            self._left_out.add(node)
        try:
            self.seal(node)
            yield
        finally:
            with self._lock:
                self._left_out.discard(node)

    def close(self) -> None:
        """Follow the logs once more, and end. End the nodes first."""
        self._closed.set()
        self._thread.join()
        self.update()


def follow(log: Path, kept: Path) -> None:
    """Bring the last life in `kept` up to date with `log`; segments that the log dropped stay.

    A new life begins if the log has no file of the last life any more.
    """
    theirs = {path.name: path for path in log.iterdir() if segment.first_of(path.name) is not None}
    if not theirs:
        return
    known = lives(kept)
    life = known[-1] if known else _another(kept)
    ours = {path.name: path for path in life.iterdir()}
    same = {name for name in ours.keys() & theirs.keys() if ours[name].samefile(theirs[name])}
    if ours and not same:
        life, ours = _another(kept), {}
    for name, path in theirs.items():
        if name in same:
            continue
        if name in ours:
            ours[name].unlink()
        (life / name).hardlink_to(path)
    first = min(theirs)
    for name in ours.keys() - theirs.keys():
        if name > first:
            ours[name].unlink()


def _another(kept: Path) -> Path:
    life = kept / f"{len(lives(kept)):03d}"
    life.mkdir(parents=True)
    return life


def places(run: Path | None, data: Path | None, into: Path | None) -> dict[str, tuple[Path, Path]]:
    """Return the logs to follow and their archives: of a local cluster, or of one node.

    Args:
        run: the folder of a local cluster; None: `data` and `into` are given.
        data: the data directory of one node.
        into: the folder of its archive.

    Returns:
        Node -> (folder of its log, folder of the archive).

    Raises:
        FileNotFoundError: there is no such folder, or no node in it.
        ValueError: not exactly one of the two is given; or `into` is in the folder of a node, has
            segments or is on another disk; or `run` is a run of the chaos suite.
    """
    if run is not None:
        if data or into:
            raise ValueError("RUN_DIR: must not be given with --data and --into")
        if (run / OWNER).exists():
            raise ValueError(f"RUN_DIR = {run}: a run of the chaos suite keeps an archive itself")
        there = RunFolder(run)
        return {name: (path / "log", there.archive_of(name)) for name, path in there.data().items()}
    if data is None or into is None:
        raise ValueError("--data, --into: must both be given if RUN_DIR is not")
    if not data.is_dir():
        raise FileNotFoundError(f"--data {data}: no such folder")
    above = (into.resolve(), *into.resolve().parents)
    for path in above:
        if path == data.resolve() or (path / data_directory.IDENTITY_NAME).exists():
            raise ValueError(f"--into {into}: must be outside of a node's folder, {path}")
    if any(segment.first_of(path.name) is not None for path in above[0].glob("*")):
        raise ValueError(f"--into {into}: must not have segments of a log")
    beside = next(path for path in above if path.exists())
    if beside.stat().st_dev != data.stat().st_dev:
        raise ValueError(f"--into {into}: must be on the disk of {data}, for hard links")
    return {data.name: (data / "log", into)}


def run_archive(run: Path | None, data: Path | None, into: Path | None) -> int:
    """Follow logs until SIGINT or SIGTERM, and print each new life. Arguments as `places`.

    Returns:
        The exit status: 2 if the arguments are wrong, or a log could not be followed to its end.
    """
    with contextlib.ExitStack() as held:
        try:
            logs = places(run, data, into)
            for log, kept in logs.values():
                held.enter_context(_locked(log, kept))
        except (OSError, EngineError, ValueError) as wrong:
            print(f"archive: {wrong}", file=sys.stderr)
            return 2
        stops = signal.SIGINT, signal.SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        for node, (log, kept) in logs.items():
            print(f"{node}: {log} is kept in {kept}", flush=True)
        begun, errors, over = Counter[str](), dict[str, str](), False
        while not over:
            over = bool(signal.sigtimedwait(stops, POLL_S))  # the logs are followed once more
            for node, (log, kept) in logs.items():
                last = errors.pop(node, "")
                try:
                    follow(log, kept)
                    begun[node] += _tell(node, lives(kept)[begun[node] :])
                except OSError as failed:  # the log is absent, being wiped, or may not be linked
                    errors[node] = str(failed)
                    if errors[node] != last:
                        print(f"{node}: {failed}; trying again", file=sys.stderr, flush=True)
        return 2 if errors else 0


@contextlib.contextmanager
def _locked(log: Path, kept: Path) -> Iterator[None]:
    """Lock an archive for the block, and bind it to its log for good.

    Two logs in one archive would begin a new life at each poll.

    Raises:
        WrongDirectoryError: another process follows a log into it.
        ValueError: it is the archive of another log.
    """
    disk = RealDisk()
    disk.make_dir(kept)
    with contextlib.ExitStack() as held:  # the lock ends with the process, too
        held.callback(disk.lock(kept / data_directory.LOCK_NAME).release)
        path, mine = kept / SOURCE, str(log.resolve())
        source = path.read_text() if path.exists() else ""
        if source not in ("", mine):
            raise ValueError(f"{kept} is the archive of {source}, as its file {SOURCE} states")
        disk.write_atomic(path, mine.encode())
        yield


def _tell(node: str, new: Sequence[Path]) -> int:
    """Print the first entry of each life that has a segment; return their number."""
    begun = [(life.name, parts[0].first) for life in new if (parts := segments(life))]
    for name, first in begun:
        more = "; earlier entries are not archived, or are in the life before" * (first > 1)
        print(f"{node}: {name} begins at entry {first}{more}", flush=True)
    return len(begun)
