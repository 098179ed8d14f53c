"""Answers to Redrive, as of a topic of dead letters whose redrives a test disturbs."""

from tests.timerclient.fake_cluster import Order
from timerclient.proto import timer_pb2 as pb

ANSWER_MAX = 100
"""Most letters that one answer sends back."""


class DeadLetters:
    """`count` letters that can go back, behind `homeless` ones that stay."""

    def __init__(self, count: int, homeless: int = 0) -> None:
        self.count = count
        self.homeless = homeless
        self.seen = 0
        """Number of homeless letters that an earlier redrive leased; later redrives skip them."""
        self.redrives = 0
        self.forget: set[int] = set()
        """Numbers of redrives after which all leases end, as after a failover."""
        self.errors: list[pb.Error | None] = []
        """Errors of the next redrives, beside their counts. None: no error."""
        self.lost = 0
        """Number of redrives with answers that are still to be lost."""

    def redrive(self, request: object) -> Order:
        """Return the answer to a Redrive, and None to other calls."""
        if not isinstance(request, pb.RedriveRequest):
            return None
        homeless = min(self.homeless - self.seen, request.max_messages)
        self.seen += homeless
        self.redrives += 1
        if self.redrives in self.forget:
            self.seen = 0
        moved = min(self.count, request.max_messages - homeless, ANSWER_MAX)
        self.count -= moved
        why = self.errors.pop(0) if self.errors else None
        if self.lost > 0:
            self.lost -= 1
            return "break"
        left = self.count + self.homeless
        return pb.RedriveResponse(redriven=moved, left=left, error=why, homeless=homeless)
