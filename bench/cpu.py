"""CPU time of processes and of the whole machine, from /proc."""

import os
import time
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def parse_process(stat: str) -> float:
    """Return the CPU seconds, user and system, in a /proc/<pid>/stat."""
    # The second field is the program's name in parentheses. It may contain any character.
    after_name = stat[stat.rindex(")") + 2 :].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S


def parse_machine(stat: str) -> float:
    """Return the busy CPU seconds in a /proc/stat, including stolen time."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, stat.split()[1:11])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def of_process(pid: int) -> float:
    """Return the CPU seconds that a process has used; 0 if it has ended."""
    try:
        return parse_process(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def busy_cores(during_s: float) -> float:
    """Wait `during_s` seconds, and return the mean number of busy cores meanwhile."""
    stat = Path("/proc/stat")
    began, used = time.monotonic(), parse_machine(stat.read_text())
    time.sleep(during_s)
    return (parse_machine(stat.read_text()) - used) / (time.monotonic() - began)
