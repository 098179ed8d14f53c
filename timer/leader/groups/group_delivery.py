"""One delivery of a group's messages, as the leader passes it to its shell."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from timer.leader.groups.lease_table import Lease
from timer.model.units import Epoch, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic


@dataclass(frozen=True, slots=True)
class Delivery:
    """A lease with its group and topic; the rows are in the topic's queue."""

    epoch: Epoch
    topic: Topic
    group: Group
    lease: Lease
    attempts: npt.NDArray[np.uint32]
    failures: npt.NDArray[np.uint32]
    """Earlier nacks and ended leases of each message, (n,)."""
    at_ms: UnixMs
    """Time of the lease on the cluster's clock, Unix milliseconds."""
