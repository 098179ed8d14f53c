"""The passes of nodes over their files, from their begin to their end.

    each node: begin --> reads ... --> ended                              \\
    all nodes: digests at the shared checkpoint, until each node has one   --> result

A node with damage ends soon after its pass, to be healed: its result stays. A node that restarts
before the end of its pass, or was silent at its start, begins another one. A pass that the node has
begun by itself is joined: a node keeps the result only of a pass that was asked for.
Nodes that neither answer nor vote are left out.
"""

import time
from contextlib import suppress
from typing import Final

from timerclient.client.timer_client import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import TimerError, Unreachable

_COMPARED: Final = (pb.AGREEMENT_SAME, pb.AGREEMENT_DIFFER)
RESTARTED: Final = "the node has restarted since, as it does to repair its files: verify it again"


class PassFollower:
    """The passes of one node or of all."""

    def __init__(self, client: TimerClient, node: str, patience_s: float) -> None:
        """Begin the passes. `node`: "": all nodes.

        `patience_s`: time for a silent node to answer again, and for digests of all nodes.
        """
        self._client, self._node, self._patience_s = client, node, patience_s
        self._passes = {each.node: each for each in client.begin_verification(node).nodes}
        self._begin_ms_by_node = {name: each.began_at_ms for name, each in self._passes.items()}
        """The time at which each node's pass began that this process has begun or joined."""
        self._last_running_s = time.monotonic()
        """When a pass was last seen to run."""
        self._answered_s = dict.fromkeys(self._passes, self._last_running_s)
        self._digests = pb.GetVerificationResponse()
        """Of the last answer, or the last in which they were compared; those that differ stay."""

    def poll(self) -> bool:
        """Look at the passes; return whether to look again."""
        now_s, answer = time.monotonic(), self._answer()
        members = {each.node for each in answer.nodes}
        for name in [n for n, p in self._passes.items() if n not in members and not p.ended_at_ms]:
            del self._passes[name]
        for each in answer.nodes:
            mine = self._passes.setdefault(each.node, pb.NodeVerification(node=each.node))
            self._answered_s.setdefault(each.node, now_s)
            if mine.ended_at_ms:
                if each.reachable and (each.began_at_ms == mine.began_at_ms or not each.damages):
                    mine.repair = each.repair or (RESTARTED if mine.damages else "")
                continue
            if each.reachable:
                self._answered_s[each.node] = now_s
                self._passes[each.node] = self._own_pass(each)
            elif not self._waits_for(each.node):
                self._passes[each.node] = each
        known = self._digests.agreement
        if known != pb.AGREEMENT_DIFFER and (
            known not in _COMPARED or answer.agreement in _COMPARED
        ):
            self._digests = answer
        if self._running_passes():
            self._last_running_s = now_s
            return True
        is_final = self._node or self._digests.agreement in _COMPARED
        silent = not all(each.reachable for each in answer.nodes)
        return not (is_final or silent) and now_s - self._last_running_s < self._patience_s

    def _own_pass(self, last: pb.NodeVerification) -> pb.NodeVerification:
        """Return the pass of a node. If its last pass is another one, it begins or joins a pass."""
        name = last.node
        if last.began_at_ms and last.began_at_ms == self._begin_ms_by_node.get(name):
            return last
        with suppress(TimerError):
            for found in self._client.begin_verification(name).nodes:
                if found.node == name and found.reachable:
                    self._begin_ms_by_node[name] = found.began_at_ms
                    return found
        return pb.NodeVerification(node=name, reachable=True)

    def _answer(self) -> pb.GetVerificationResponse:
        try:
            return self._client.verification(self._node)
        except Unreachable as error:
            silent = [pb.NodeVerification(node=name, error=str(error)) for name in self._passes]
            return pb.GetVerificationResponse(nodes=silent)

    def _waits_for(self, node: str) -> bool:
        return time.monotonic() - self._answered_s[node] < self._patience_s

    def _running_passes(self) -> list[pb.NodeVerification]:
        """Return the passes that may go on."""
        passes = [each for each in self._passes.values() if not each.ended_at_ms]
        return [each for each in passes if each.reachable or self._waits_for(each.node)]

    @property
    def progress(self) -> str:
        """The shares of the bytes that are read by the passes that run; empty: none runs."""
        return ", ".join(f"{each.node} {share_of(each)}" for each in self._running_passes())

    def result(self) -> pb.GetVerificationResponse:
        """Return the passes, with the digests of the last comparison."""
        found, digests = pb.GetVerificationResponse(), self._digests
        found.digest_index = digests.digest_index
        if not self._node:
            found.agreement = digests.agreement or pb.AGREEMENT_UNKNOWN
        known = {each.node: each.digest for each in digests.nodes}
        for name, each in sorted(self._passes.items()):
            found.nodes.add().CopyFrom(each)
            found.nodes[-1].digest = known.get(name, "")
        return found


def share_of(each: pb.NodeVerification) -> str:
    """Return how much of its bytes a pass has read."""
    if not each.reachable:
        return "does not answer"
    return f"{100 * min(1.0, each.bytes / max(1, each.bytes_total)):.0f} %"
