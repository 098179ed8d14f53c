"""The nodes' logs: the frames that a majority holds, and the frames that differ (logs.sql).

**One replay is enough.** Frames are compared first, by epoch, kind, time and CRC-32, entry by entry
over all nodes. Entries decide all fates, so logs with equal frames have equal fates. One log that
agrees with the majority is replayed, for all nodes. If a node's entry differs, the entry is
reported. Each timer that the majority's entry at that index scheduled, fired or cancelled is
`diverged`.

**Lives.** A node whose log was lost or damaged begins a new log after a snapshot. The new log is
another life of the node, and is compared with the other nodes from its beginning. The entries of
the old life count as held by the node, too. A snapshot covers committed entries only. Below its end
fewer than a majority of logs may be left. If these differ, the frame of the latest epoch counts.
The replay reads lives that agree with the majority, one after the other.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame, Row

from chaos.spark.timerstate import ManifestState

_EPOCH: Final = ("epoch", "since_ms", "entries", "last", "began_ms", "fired_ms")
EPOCHS: Final = ", ".join(f"{name} BIGINT" for name in _EPOCH)
"""The columns of the query `epochs`."""


def short(
    held: Sequence[Mapping[str, Any]],
    spoken: DataFrame,
    states: Iterable[ManifestState],
    lost: Container[str],
) -> list[dict[str, Any]]:
    """Return the nodes whose logs end before an entry that they had: node, last, known.

    `held`: from the query `ends`. `spoken`, `states`: the nodes' reports and manifests. `lost`:
    nodes that lost their disks; they are not judged.
    """
    had = [(each.node, each.index) for each in states]
    had += [(row[0], row[1]) for row in spoken.groupBy("node").agg({"index": "max"}).collect()]
    known = {node: index for node, index in sorted(had) if node not in lost}  # the greatest counts
    lasts = {node: index for index, node in sorted((life["last"], life["node"]) for life in held)}
    return [
        {"node": node, "last": lasts.get(node, 0), "known": index}
        for node, index in known.items()
        if index > lasts.get(node, 0)
    ]


def untrue_epochs(leaders: Sequence[Row], replicas: Collection[str]) -> list[dict[str, Any]]:
    """Return the EPOCH entries that contradict the rules: index, epoch, why.

    `leaders`: the replay's rows, in order. `replicas`: the replicas of the folder's nodes; empty:
    not all are known.
    """
    found, before = [], frozenset[str]()
    for at, row in enumerate(leaders):
        voters, why = frozenset(row["voters"]), ""
        if row["said_epoch"] != row["epoch"]:
            why = f"it names epoch {row['said_epoch']}"
        elif row["leader"] not in voters | before:
            why = f"its leader {row['leader']} is no voter"
        elif before and (len(voters - before) > 1 or len(before - voters) > 1):
            why = "more than one voter came or went"
        elif at == len(leaders) - 1 and replicas and not voters <= {*replicas}:
            why = f"voters {', '.join(sorted(voters - {*replicas}))} are none of the nodes"
        if why:
            found.append({"index": row["epoch_index"], "epoch": row["epoch"], "why": why})
        before = voters
    return found
