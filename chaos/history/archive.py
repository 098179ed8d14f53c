"""The archive: hard links to every segment of the nodes' logs, so that none is gone at the end.

    timerctl archive RUN_DIR                         a local cluster: into its nodes/NODE/kept
    timerctl archive --data DIR --into ARCHIVE       one node's data directory, on its machine

A node drops segments of its log once a manifest covers them and every voter has them. The audit
replays logs from their first entry. So this keeps, beside a node's data, a second name for every
segment file, and follows what the node does to its log:

    appears             linked
    dropped (oldest)    stays linked: all below the log's first segment is committed for good
    truncated away      unlinked: a segment at or above the log's first that the log has no more
    made anew           linked anew: another file under the same name
    all files others    the log began anew: after a wipe, after a snapshot. Another life begins

    ARCHIVE/000/*.log      its first life
    ARCHIVE/001/*.log      after it lost its log and got another one
    ARCHIVE/SOURCE         whose log it is, locked while the command follows it

A link is made within POLL_S of the file; a segment lives for longer, since a node drops only what
lies below a manifest that it made afterwards. It takes no room but that of what was dropped.
"""

import contextlib
import fcntl
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from chaos.history.history import OWNER, RunFolder
from chaos.history.nodelog import lives, segments
from timer.files import segment

POLL_S: Final = 0.25
SOURCE: Final = "SOURCE"


class Archive:
    """Follows the logs of a run in a thread of its own, until it is closed."""

    def __init__(self, logs: Mapping[str, tuple[Path, Path]]) -> None:
        """Follow `logs`: node -> (its log's folder, the archive's folder on the same disk)."""
        self._logs = dict(logs)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="archive", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._closed.wait(POLL_S):
            self.update()

    def update(self) -> None:
        """Follow all logs to where they are now."""
        with self._lock:
            for log, kept in self._logs.values():
                # A disk that lost its power, a folder that was wiped: it comes back.
                with contextlib.suppress(OSError):
                    follow(log, kept)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is followed meanwhile: a disk can be unmounted."""
        with self._lock:
            yield

    def seal(self, node: str) -> None:
        """Keep what a node's log holds now; what is done to its files from here on is another life.

        The node has ended, and only the last segment is going to be damaged.
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

    def close(self) -> None:
        """Follow the logs for the last time, and end. The nodes have ended."""
        self._closed.set()
        self._thread.join()
        self.update()


def follow(log: Path, kept: Path) -> None:
    """Make the last life in `kept` hold what `log` does, and what was dropped from its beginning.

    Another life begins if the log has no file of the last one any more.
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
    """Begin another life."""
    life = kept / f"{len(lives(kept)):03d}"
    life.mkdir(parents=True)
    return life


def places(run: Path | None, data: Path | None, into: Path | None) -> dict[str, tuple[Path, Path]]:
    """Return what `Archive` follows: of a local cluster's folder, or of one node's data.

    Raises:
        FileNotFoundError: there is no such folder, or no node in it.
        ValueError: neither is named, or both; or the archive could not be, or not stay, there.
    """
    if run is not None:
        if data or into:
            raise ValueError("RUN_DIR = a local cluster's: must be without --data and --into")
        if (run / OWNER).exists():
            raise ValueError(f"RUN_DIR = {run}: a run of the chaos suite keeps an archive itself")
        there = RunFolder(run)
        return {name: (path / "log", there.kept(name)) for name, path in there.data().items()}
    if data is None or into is None:
        raise ValueError("--data, --into: must both be named where RUN_DIR is not")
    if not data.is_dir():
        raise FileNotFoundError(f"--data {data}: no such folder")
    if into.resolve().is_relative_to(data.resolve()):
        raise ValueError(f"--into {into}: must lie outside of the node's own folder, {data}")
    beside = next(path for path in (into.resolve(), *into.resolve().parents) if path.exists())
    if beside.stat().st_dev != data.stat().st_dev:
        raise ValueError(f"--into {into}: must be on the disk of {data}, for hard links")
    into.mkdir(parents=True, exist_ok=True)
    return {data.name: (data / "log", into)}


def run_archive(run: Path | None, data: Path | None, into: Path | None) -> int:
    """Follow logs until a signal comes; say which lives there are; return the exit status.

    That is 2 if it can't be done, or could not be at the end.
    """
    with contextlib.ExitStack() as held:
        try:
            logs = places(run, data, into)
            for log, kept in logs.values():
                held.enter_context(_held(log, kept))
        except (OSError, ValueError) as wrong:
            print(f"archive: {wrong}", file=sys.stderr)
            return 2
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        told = [_Told(node, *where) for node, where in logs.items()]
        while not stopped.wait(POLL_S):
            for each in told:
                each.follow()
        followed = [each.follow() for each in told]
        return 0 if all(followed) else 2


@contextlib.contextmanager
def _held(log: Path, kept: Path) -> Iterator[None]:
    """Keep others from following a log into this archive; it is that log's for good.

    Raises:
        ValueError: somebody does, or it is another log's: each would begin a life at every look.
    """
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / SOURCE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with the process
        except OSError:
            raise ValueError(f"{kept}: another archive is being made there") from None
        file.seek(0)
        source, mine = file.read(), str(log.resolve())
        if source not in ("", mine):
            raise ValueError(f"{kept} is the archive of {source}, by the file {SOURCE} in it")
        if not source:
            file.write(mine)
            file.flush()
        yield


class _Told:
    """Follows one node's log, and prints what anybody should know of it, once."""

    def __init__(self, node: str, log: Path, kept: Path) -> None:
        self._node, self._log, self._kept = node, log, kept
        self._lives = 0
        self._error = ""
        print(f"{node}: {log} is kept in {kept}", flush=True)

    def follow(self) -> bool:
        """See the function of this name; return whether it could be done."""
        error = ""
        try:
            follow(self._log, self._kept)
            self._tell_lives()
        except OSError as failed:  # it is not there yet, or just being wiped; or nobody may link it
            error = str(failed)
        if error and error != self._error:
            print(f"{self._node}: {error}; trying again", file=sys.stderr, flush=True)
        self._error = error
        return not error

    def _tell_lives(self) -> None:
        for life in lives(self._kept)[self._lives :]:
            if not (parts := segments(life)):
                break  # nothing could be linked yet
            self._lives += 1
            print(_of_life(self._node, life, parts[0].first), flush=True)


def _of_life(node: str, life: Path, first: int) -> str:
    begins = f"{node}: {life.name} begins at entry {first}"
    if first == 1:
        return begins
    return f"{begins}; what its log had before is not there, or in the life before"
