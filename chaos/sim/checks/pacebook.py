"""Rates of delivery, from the leaders' deliveries; a part of the book.

Worlds with `traits` have one rate of all groups, which their operator sets once. Each group has a
bucket of the world's own time, a little faster than any node's clock. Independent of
timer/leader/groups/delivery_rates.py.
"""

from dataclasses import dataclass, field
from typing import Final

from chaos.sim.world.referee import Broken
from timer.leader.groups.group_delivery import Delivery

CLOCK_ERROR: Final = 1.05


@dataclass(slots=True)
class PaceBook:
    """See the module; `handed_out` raises Broken."""

    levels: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """(topic, group) -> (time of the last delivery in microseconds, fill of its bucket)."""
    judged: int = 0
    """Deliveries of groups with a rate."""

    def handed_out(self, delivery: Delivery, rate: int, now_us: int) -> None:
        """Check a delivery. `rate`: most messages a second to each group; 0: no limit."""
        if not rate:
            return
        self.judged += 1
        place = delivery.topic.name, delivery.group.name
        before_us, fill = self.levels.get(place, (now_us, 0.0))
        drained = rate * CLOCK_ERROR * (now_us - before_us) / 1e6
        fill = max(0.0, fill - drained) + len(delivery.lease.offsets)
        self.levels[place] = now_us, fill
        if fill > max(rate / 10, 1) + 1:
            raise Broken("rate", f"{place} has {fill:.1f} messages above {rate} a second")
