"""The figures that only the leader has, such as lag and deliveries, on the pages of other nodes.

    viewers --> n2, a follower --Figures, at most once in EVERY_MS--> n1, the leader
                               <--JSON, from the leader's own `Measurement`--

The call is one of nodes, on their own port: a caller's rules were checked on the follower, and
cover all that the page shows. A release without the call answers UNIMPLEMENTED.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

import grpc

from cluster.api.peer_queries import PART_S, why
from cluster.page.measurement import Measurement
from timer.model.units import MonoMs

SERVICE: Final = "timer.cluster.Page"
METHOD: Final = f"/{SERVICE}/Figures"
EVERY_MS: Final = 1_000
OLD_MS: Final = 5_000
"""Age of an answer that is not shown any more."""

Figures = Mapping[str, Any]
"""counters, lateness, lags and lags_age_ms of `/v1/overview`; see page_routes.py."""
_Context = grpc.aio.ServicerContext[Any, Any]


class LeaderAnswer(NamedTuple):
    """The answer of the leader."""

    leader: str
    """Name of the node that was asked."""
    figures: Figures | None
    why: str
    """Reason why there are no figures; empty: there are."""


def handler_of(read: Callable[[], Awaitable[Figures | None]]) -> grpc.GenericRpcHandler:
    """Return the handler of the call. `read` returns the figures; None: this node does not lead."""

    async def figures(request: bytes, context: _Context) -> bytes:
        del request, context
        return json.dumps(await read()).encode()

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(figures)
    return grpc.method_handlers_generic_handler(SERVICE, {"Figures": method})


class LeaderFigures:
    """Asks the leader on behalf of all viewers of a node that does not lead."""

    def __init__(
        self,
        leader: Callable[[], str],
        channel: Callable[[str], grpc.aio.Channel],
        mono_ms: Callable[[], MonoMs],
    ) -> None:
        """`leader` returns the name of another node that leads; empty: none is known.

        `channel` returns the channel to the node with a name.
        """
        self._leader, self._channel = leader, channel
        self._answer = Measurement(self._ask, mono_ms, every_ms=EVERY_MS)

    async def read(self, wait_s: float) -> LeaderAnswer:
        """Return the last answer of the present leader. Wait at most `wait_s` for a new one."""
        leader = self._leader()
        if not leader:
            return LeaderAnswer("", None, "no node leads")
        answer, age_ms = await self._answer.read(wait_s), self._answer.age_ms
        if answer is None or age_ms is None or age_ms > OLD_MS or answer.leader != leader:
            return LeaderAnswer(leader, None, "the leader has not answered yet")
        if answer.figures is None or answer.figures["lags_age_ms"] is None:
            return answer
        aged = {**answer.figures, "lags_age_ms": answer.figures["lags_age_ms"] + age_ms}
        return answer._replace(figures=aged)

    async def stop(self) -> None:
        """Cancel a call under way."""
        await self._answer.stop()

    async def _ask(self) -> LeaderAnswer:
        leader = self._leader()
        if not leader:
            return LeaderAnswer("", None, "no node leads")
        call: Any = self._channel(leader).unary_unary(METHOD)
        try:
            figures = json.loads(await call(b"", timeout=PART_S))
        except grpc.aio.AioRpcError as failed:
            if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
                return LeaderAnswer(leader, None, "the leader's release does not serve this call")
            if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return LeaderAnswer(leader, None, f"the leader does not answer within {PART_S:g} s")
            return LeaderAnswer(leader, None, f"the leader does not answer ({why(failed)})")
        return LeaderAnswer(leader, figures, "" if figures else "the leader does not lead yet")
