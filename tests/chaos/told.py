"""The messages that a witness has recorded so far."""

from pathlib import Path
from typing import Any

from chaos.history.history import RunFolder, read
from chaos.live.recorded_messages import LIVE
from timer.model import timer_id


def deliveries(run: Path) -> list[dict[str, Any]]:
    """Return the lines with messages."""
    paths = sorted(RunFolder(run / LIVE).histories.glob("*.jsonl"))
    return [line for path in paths for line in read(path) if line["op"] == "deliver"]


def seqs_of(ids: list[str]) -> list[int]:
    """Return the seqs of timers."""
    raw = b"".join(map(timer_id.from_text, ids))
    seqs: list[int] = timer_id.decode(raw, 0)[1].tolist()
    return seqs


def seqs(run: Path) -> set[int]:
    """Return the seqs of the messages."""
    return {seq for line in deliveries(run) for seq in seqs_of(line["ids"])}
