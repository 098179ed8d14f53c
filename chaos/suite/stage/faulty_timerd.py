"""`timerd` on a disk that a file can make slow, hang or fail (chaos/suite/stage/disk_faults.py).

python -m chaos.suite.stage.faulty_timerd --config RUN/n1.toml     obeys RUN/disk-faults/n1.json
python -m chaos.suite.stage.faulty_timerd init …                   as `timerd init`

Raft's snapshots, which take hours of use, are written within seconds.
"""

import sys
from pathlib import Path
from typing import Final

from chaos.suite.stage.disk_faults import FOLDER, FaultyCalls
from cluster.control import raft
from cluster.node import timerd

RAFT_SNAPSHOT_S: Final = 10.0
"""Between two snapshots of a node's Raft."""


def main(argv: list[str] | None = None) -> int:
    """Run `timerd`; return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--config" in arguments:
        raft.SETTINGS["logCompactionMinTime"] = RAFT_SNAPSHOT_S
        config = Path(arguments[arguments.index("--config") + 1])
        FaultyCalls(config.parent / FOLDER / f"{config.stem}.json").install()
    return timerd.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
