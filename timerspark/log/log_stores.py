"""Logs in object stores, for the format "timerlog": every file system that pyarrow.fs opens.

    driver: identity, manifest, all segments --copied--> a temporary folder --> the plan
    task:   its own segment, durable mark ----copied--> a temporary folder --> the rows

The plan needs the head of each entry, so the driver reads the whole log once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

from timer.files import segment
from timer.files.data_directory import IDENTITY_NAME
from timer.files.log import MARK_NAME
from timer.recovery import manifest

_NAMES: Final = frozenset({IDENTITY_NAME, manifest.NAME})
"""Files besides segments that a plan reads."""


def is_uri(path: str) -> bool:
    """Return whether a path is in a store, such as s3://bucket/prefix?region=eu-west-1."""
    return "://" in path


@contextmanager
def plan_files(path: str) -> Iterator[Path]:
    """Yield a folder with the files of a log that a plan reads.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is a URI of no file system that pyarrow.fs knows.
    """
    if not is_uri(path):
        yield Path(path).absolute()
        return
    from pyarrow import fs

    store, base = _open_store(path)
    with TemporaryDirectory(prefix="timerlog-") as folder:
        root = Path(folder) / PurePosixPath(base).name
        root.mkdir()
        for each in store.get_file_info(fs.FileSelector(base, recursive=True)):
            name = PurePosixPath(each.path)
            if each.is_file and (name.name in _NAMES or segment.first_of(name.name)):
                _copy(store, each.path, root / name.relative_to(base))
        yield root


@contextmanager
def segment_file(path: str, name: str) -> Iterator[Path]:
    """Yield one segment of a log, beside the log's durable mark if it has one.

    `name`: its path; in a store, from the folder of the log on.
    """
    if not is_uri(path):
        yield Path(name)
        return
    store, base = _open_store(path)
    source = PurePosixPath(base) / name
    mark = source.with_name(MARK_NAME)
    with TemporaryDirectory(prefix="timerlog-") as folder:
        if store.get_file_info(str(mark)).is_file:
            _copy(store, str(mark), Path(folder) / MARK_NAME)
        copy = Path(folder) / source.name
        _copy(store, str(source), copy)
        yield copy


def _open_store(uri: str) -> tuple[Any, str]:
    from pyarrow import ArrowInvalid, fs

    try:
        store, base = fs.FileSystem.from_uri(uri)
    except ArrowInvalid as error:
        raise ValueError(f"path = {uri!r}: {error}") from None
    return store, base


def _copy(store: Any, source: str, target: Path) -> None:
    from pyarrow import fs

    target.parent.mkdir(parents=True, exist_ok=True)
    fs.copy_files(
        source, str(target), source_filesystem=store, destination_filesystem=fs.LocalFileSystem()
    )
