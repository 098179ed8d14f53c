"""The folder of a run, and other folders with nodes' logs.

a data directory    log/*.log
an archive          000/*.log, 001/*.log, … (chaos/history/archive.py)
a run               <node>/log/*.log, or the data directories that cluster.json names, or the
                    archives nodes/<node>/kept
"""

import json
from dataclasses import dataclass
from pathlib import Path

from timerspark.log.segment_files import Segment, lives, segments


@dataclass(frozen=True, slots=True)
class NodeFolders:
    """The paths of nodes' logs in a folder."""

    root: Path

    @property
    def cluster_file(self) -> Path:
        """The list of a local cluster's nodes and their data directories."""
        return self.root / "cluster.json"

    def archive_of(self, node: str) -> Path:
        """Return the folder of the archive of a node's log; absent without an archive."""
        return self.root / "nodes" / node / "kept"

    def data(self) -> dict[str, Path]:
        """Return node name -> its data directory, or its archive.

        Raises:
            FileNotFoundError: the run has no node's data.
            ValueError: cluster.json is damaged, or lists a node or a directory twice. One log would
                then count as the logs of several nodes.
        """
        if self.cluster_file.exists():
            return self._listed_data()
        itself = {self.root.resolve().name: self.root}
        if (self.root / "log").is_dir():
            return itself
        if found := {path.parent.name: path.parent for path in sorted(self.root.glob("*/log"))}:
            return found  # also of nodes whose names are numbers, as those of lives are
        if lives(self.root):
            return itself
        raise FileNotFoundError(f"{self.root}: neither cluster.json nor <node>/log")

    def _listed_data(self) -> dict[str, Path]:
        try:
            nodes = json.loads(self.cluster_file.read_text())["nodes"]
            pairs = [(str(node["name"]), self.root / node["data"]) for node in nodes]
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(
                f"{self.cluster_file} names no nodes and their data: {error!r}"
            ) from error
        names, places = {name for name, _ in pairs}, {data.resolve() for _, data in pairs}
        if not len(names) == len(places) == len(pairs):
            raise ValueError(f"{self.cluster_file}: each node must have a name and data of its own")
        if not pairs:
            raise FileNotFoundError(f"{self.cluster_file}: names no node")
        return dict(pairs)

    def nodes(self) -> dict[str, Path]:
        """Return node name -> its log's folder.

        Raises:
            FileNotFoundError: the run has no node's data.
        """
        return {
            name: next(filter(lives, (self.archive_of(name), data)), data / "log")
            for name, data in self.data().items()
        }

    def logs(self) -> dict[str, list[list[Segment]]]:
        """Return node name -> the segments of its log, in order; one list per life.

        An archive's newest segment is read where the node has it, beside the log's durable mark.

        Raises:
            FileNotFoundError: the run has no node's data.
            ValueError: the archive ended before its node, so it lacks a segment of the log.
        """
        logs = {n: [*map(segments, lives(log) or [log])] for n, log in self.nodes().items()}
        for name, data in self.data().items():
            own = data / "log"
            if lives(self.archive_of(name)) and own.is_dir():
                newest, parts = logs[name][-1], segments(own)
                archived = {each.path.name for each in newest}
                names = (each.path.name for each in parts)
                if late := [each for each in names if each not in archived]:
                    ended = f"{self.archive_of(name)} lacks {late[0]} of {own}"
                    raise ValueError(f"{ended}: the archive ended before its node")
                if parts and parts[-1].path.samefile(newest[-1].path):
                    newest[-1] = parts[-1]
        return logs
