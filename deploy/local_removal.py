"""Removal of a stopped local cluster: the files that `start` made, and no others."""

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from deploy import local_tls

FILES: Final = ("cluster.json", "cluster.tmp", "LOCK")
IDENTITY: Final = "identity.json"
"""The file of a data directory that `timerd init` makes."""
FOLDERS: Final = ("logs", local_tls.FOLDER)


def remove_files(
    directory: Path, nodes: Iterable[tuple[str, str]], keep: Collection[Path] = ()
) -> list[Path]:
    """Remove the files of a cluster, then its directory if nothing else is in it.

    Args:
        directory: directory of the cluster.
        nodes: name and data directory of each node. A data directory that does not lie within
            `directory` stays.
        keep: files and directories in `directory` that stay, or `directory` itself.

    Returns:
        The other files of the directory, and the data directories that stay; empty: all is removed.
    """
    inside, stay = directory.resolve(), []
    known = [directory / name for name in FOLDERS]
    for name, data in nodes:
        known.append(directory / f"{Path(name).name}.toml")
        path = (directory / data).resolve()
        if inside in path.parents:
            known.append(directory / data)
        elif path.exists():
            stay.append(path)
    # cluster.json goes last: if an earlier file can't be removed, a further call finds the nodes.
    for path in [*known, *(directory / name for name in reversed(FILES))]:
        if directory / path.relative_to(directory).parts[0] in keep:
            continue
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    stay += sorted(directory.iterdir())
    if not stay and directory not in keep:
        directory.rmdir()
    return stay


def present(directory: Path) -> list[Path]:
    """Return a directory and the files in it; empty: it does not exist."""
    return [directory, *directory.iterdir()] if directory.is_dir() else []
