"""The pending timers of a manifest, read from its runs in the order of their due times.

For files at rest, such as those of a backup. Memory: a slice of each run.
"""

from collections.abc import Iterator
from pathlib import Path

from timer.files.disk import Disk
from timer.model.columns import Buffers, RowArray
from timer.model.firing_order import Position
from timer.model.units import TopicId
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.runs.merge import Merge, merged_rows
from timer.pending.runs.run import Run, RunMeta, is_tombstone
from timer.recovery.manifest import RUN_DIRECTORY, ManifestBody


def pending_rows(
    state: ManifestBody, disk: Disk, directory: Path
) -> Iterator[tuple[RowArray, Buffers]]:
    """Yield the live rows of a state, with the buffers that they point into.

    Rows that are not held come first, in (due, seq) order. Held rows follow, in the same order:
    their due times have passed, and their topics are paused; their stored dues are as in
    timer/pending/memory/held_rows.py.

    Raises:
        CorruptFileError: a run is missing or damaged.
    """
    metas = [RunMeta.unpack(fields) for fields in state["runs"]]
    runs = tuple(Run(disk, directory / RUN_DIRECTORY, meta) for meta in metas)
    topics = [TopicId(topic["id"]) for topic in state["topics"]]
    deleted_topics = DeletedTopics.all_but(topics, TopicId(state["next"][1]))
    whole = Merge(runs, range(0), 0, Position(*state["fire_position"]), deleted_topics)
    for rows, bufs in merged_rows(whole):
        found = rows[~is_tombstone(rows)]
        if len(found):
            yield found, bufs
