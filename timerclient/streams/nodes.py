"""The nodes of a cluster: their channels, and the search for the leader.

    unknown ──probe──► known ──NOT_LEADER, broken, silent──► unknown
            ──the leader is out of reach──► relayed ──error, silent──► unknown
                                               └──the leader answers──► known

A client accepts a leader only by the node's own answer. It probes a node (`GetStatus`, local)
before it sends a request, so a request is sent only over an open connection. The leader that a
NOT_LEADER names is probed first. If a node falls silent, the client probes all nodes, because
neither a paused process nor a network that drops packets closes a connection.

A client behind a load balancer or outside of the nodes' network may not reach the leader's
address. Then a node that it reaches and that hears the leader relays its requests. While such a
client is in use, it probes the leader every 10 to 20 s, and returns once that answers. Calls at the
relay stay as long as that hears the leader.

A round of probes is short, so that dead nodes do not delay it. The time for an answer grows with
the duration of the search, to 5 s after 20 s. From then on, a node that drops packets delays each
round by 5 s after the other nodes' answers.
"""

import asyncio
import copy
import math
import os
import random
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import grpc

from timerclient.proto import timer_pb2 as pb
from timerclient.streams.node_channel import Dial, NodeChannel, note_channel
from timerclient.values import errors
from timerclient.values.client_events import (
    MISSING_S,
    Connected,
    Events,
    LeaderChanged,
    LeaderMissing,
)
from timerclient.values.client_settings import ClientSettings
from timerclient.values.errors import (
    Closed,
    ConnectionLost,
    LeadershipLost,
    NotLeader,
    NotReady,
    OutcomeUnknown,
    PermissionDenied,
    TimerError,
    TokenRejected,
    Unreachable,
)
from timerclient.values.lease_clock import boot_time_s, clock_of
from timerclient.values.wire_errors import from_rpc

T = TypeVar("T")

RELAYED_S: Final = 1.0
"""Seconds of a search until a node relays the requests to a leader that can't be reached. A
failover takes half of that."""
RELAYED_SLOW_S: Final = 5.0
"""The same if the leader's address only did not answer in time. The leader may be busy."""
RETURN_S: Final = 10.0, 20.0
"""Least and greatest pause between two probes of the leader by a client that is relayed."""

Method = Callable[[NodeChannel, float], Awaitable[T]]
"""A call of a node; its second argument is the deadline in seconds."""

NODE_MARGIN_S: Final = 1.0
"""Seconds from the caller's deadline to the node's. The caller's clock ends the call; the node's
deadline stops its work on calls that were given up."""
DEADLINE_S_MAX: Final = 365 * 86_400.0
"""The longest deadline of a message, in seconds. Without one the nodes assume ten seconds."""


class RetryPauses:
    """Pauses between attempts: none before the first retry, then doubling, with jitter."""

    def __init__(self, settings: ClientSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._next_s = 0.0

    def reset(self) -> None:
        """Reset the pauses after a success."""
        self._next_s = 0.0

    def take(self, at_least_s: float = 0.0) -> float:
        """Return the next pause, in seconds; at least the cluster's retry time `at_least_s`."""
        pause_s = self._next_s * self._rng.uniform(0.5, 1.0)
        low, high = self._settings.pause_s_min, self._settings.pause_s_max
        self._next_s = min(max(2 * self._next_s, low), high)
        return max(pause_s, at_least_s * self._rng.uniform(1.0, 1.25))


_DENIALS: Final = (PermissionDenied, TokenRejected)
RANK_MAX: Final = 1 << 63
"""Highest rank: an answer with it is returned at once."""
PATIENCE_S_MAX: Final = 5.0
"""Longest time for a node's answer to a probe, in seconds."""
FORGET_S: Final = 30.0
"""Seconds without a search after which a new search starts. A round may take twice the patience:
for the hinted node, then for all nodes."""


class Nodes:
    """All nodes of one cluster; lives on one event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        settings: ClientSettings,
        dial: Dial,
        *,
        events: Events | None = None,
        over_tcp: bool = False,
        call_others: bool = True,
    ) -> None:
        """`over_tcp`: `dial` makes gRPC's own channels, which do not survive a fork.

        `call_others`: False: only nodes at `addresses` are called. Nodes name each other's ports
        for certificates, which take no token.
        """
        self._calls_others = call_others
        self.pid = os.getpid()
        self._over_tcp = over_tcp
        self.settings = settings
        self.events = events or Events()
        self.clock = clock_of(dial)
        self.rng = random.Random()  # noqa: S311 -- jitter, no secret
        self.epoch = 0
        """The highest epoch that a delivery or an opened consumer carried."""
        self.last_error: TimerError | None = None
        self._probe_errors: dict[str, TimerError] = {}
        """Address -> why the last probe of the node there failed."""
        self._followers: dict[str, tuple[str, int]] = {}
        """Address of a node that does not lead -> (address, epoch) of the leader that it heard, by
        the last round of probes; an empty address: it hears none."""
        self._denials: dict[str, TimerError] = {}
        """Address -> why the last round's probe was denied there: all calls are. Or the port speaks
        no gRPC, and this client has not found a leader yet."""
        self._addresses = list(addresses)
        self._dial = dial
        self._has_new_files: Callable[[], bool] = getattr(dial, "has_new_files", lambda: False)
        """Returns whether the channels made so far have an outdated certificate."""
        self._date_error: Callable[[], str] = getattr(dial, "date_error", lambda: "")
        self._nodes: dict[str, NodeChannel] = {}
        self._relays: dict[str, NodeChannel] = {}
        """Address -> the node there, for requests that it relays; with a connection of its own."""
        self._outdated: WeakSet[NodeChannel] = WeakSet()
        """Nodes with calls from before the certificate changed. The end of the last call frees and
        closes one."""
        self._closed = False
        self._leader: NodeChannel | None = None
        self._last_announced: tuple[str, int] | None = None
        """(address, epoch) of the leader in the last event. None: there was no event."""
        self._missing_s = MISSING_S
        """Seconds without a leader after which the next event follows."""
        self._hint = ""
        self._leader_epoch = 0
        self._search_began_s: float | None = None
        """When the search for the leader began, on the loop's clock. None: the leader is known."""
        self._last_search_s = 0.0
        self._last_stay_s = WeakKeyDictionary[NodeChannel, float]()
        """Silent node -> time of the last check in which no other replaced it."""
        self._return_at = 0.0
        """When a relayed client probes the leader again."""
        self._leader_probe: asyncio.Task[None] | None = None
        """The last probe of the leader alone: see `_leave_silent` and `_return_to_leader`."""
        self._search_lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the first call."""

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running event loop.

        Raises:
            RuntimeError: It is another one than that of the first call.
        """
        running = asyncio.get_running_loop()
        self._loop = self._loop or running
        if running is not self._loop:
            text = (
                "this client belongs to another event loop; asyncio.run makes a new one each time"
            )
            raise RuntimeError(f"{text}: make a client in each, or use TimerClient")
        return running

    def node(self, address: str) -> NodeChannel:
        """Return the node at an address. It connects at its first call.

        Raises:
            Closed: The client is closed.
        """
        return self._node(address, relays=False)

    def _node(self, address: str, *, relays: bool) -> NodeChannel:
        if self._closed:
            raise Closed("the client is closed")
        if self._has_new_files():
            self._outdated.update([*self._nodes.values(), *self._relays.values()])
            self._nodes.clear()
            self._relays.clear()
            self._leader = None
        nodes = self._relays if relays else self._nodes
        node = nodes.get(address)
        if node is None:
            node = nodes[address] = NodeChannel(address, self._dial(address), relays=relays)
            if self._over_tcp:
                note_channel(node)
        return node

    async def close(self) -> None:
        """Close all channels."""
        nodes = self._end()
        trial, self._leader_probe = self._leader_probe, None
        if trial is not None and trial.get_loop() is asyncio.get_running_loop():
            await cancel_and_wait([trial])
        await asyncio.gather(*(node.close() for node in nodes))
        self.last_error = None  # tracebacks have nodes
        self._probe_errors.clear()
        self._denials.clear()

    def abandon(self) -> None:
        """Close all channels, of an event loop that has ended."""
        for node in self._end():
            node.abandon()

    def _end(self) -> list[NodeChannel]:
        """Forget all nodes; return them."""
        self._closed = True
        nodes = [*self._outdated, *self._nodes.values(), *self._relays.values()]
        self._nodes, self._relays, self._outdated, self._leader = {}, {}, WeakSet(), None
        return nodes

    # ---- the leader

    async def leader(self, *, denied: bool = False) -> NodeChannel:
        """Return the leader, or a node that relays to it. Search without a time limit.

        Raises:
            Closed: The client is closed.
            PermissionDenied, TokenRejected, Unreachable: With `denied`: every node denies this
                client all calls, or speaks no gRPC.
        """
        pauses = RetryPauses(self.settings, self.rng)
        while True:
            async with self._search_lock:
                self._note_search()
                leader = self._leader or await self._probe_hint() or await self._probe_all()
                leader = leader or self._find_relay(self._searched_s)
                if leader is not None:
                    self._use(leader)
            if leader is not None:
                self._try_to_return()
                return leader
            if denied:
                self._check_denied()
            self._report_missing()
            await asyncio.sleep(max(pauses.take(), self.settings.pause_s_min))

    def _check_denied(self) -> None:
        addresses = {*self._addresses, *self._nodes}
        if addresses <= self._denials.keys():
            raise copy.copy(self._denials[self._addresses[0]])

    def _use(self, leader: NodeChannel) -> None:
        """Send further calls to `leader`, or to the leader by way of it."""
        if leader.relays and leader is not self._leader:
            self._return_at = self._next_return_s()
        self._leader, self._search_began_s = leader, None
        now = leader.address, self._leader_epoch
        if self._last_announced == now and self._missing_s == MISSING_S:
            return
        first = self._last_announced is None or self._missing_s > MISSING_S
        self._last_announced, self._missing_s = now, MISSING_S
        event = Connected if first else LeaderChanged
        self.events.report(event(*now, relayed=leader.relays))

    def _report_missing(self) -> None:
        missing_s = self._searched_s
        if missing_s >= self._missing_s:
            self._missing_s = 2 * missing_s
            self.events.report(LeaderMissing(missing_s, str(self.last_error)))

    def on_failure(self, node: NodeChannel, error: TimerError) -> None:
        """Note that `node` rejected or failed a request, and may no longer lead."""
        self.last_error = error
        rejected = isinstance(error, TokenRejected)  # the next search reads the token again
        if not (rejected or errors.means_move(error)):
            return
        if self._leader is node:
            self._leader = None
        if isinstance(error, NotLeader) and error.leader != node.address:
            self._hint = error.leader

    async def check(self, node: NodeChannel, *, silent: bool, free: bool) -> None:
        """Check that a call or a stream stays with its node.

        `silent`: it has had no answer for `stall_s`. `free`: it may move at no cost.

        Raises:
            LeadershipLost: It moves: the node fell silent and another one is used, or the node
                relays it and the leader is in reach again.
        """
        self._try_to_return()
        direct = self._leader is not None and not self._leader.relays
        if free and direct and node.relays:
            raise LeadershipLost(f"{node.address} relays, and the leader is in reach again")
        if silent and await self._is_replaced(node):
            raise LeadershipLost(f"{node.address} fell silent and another node is used")

    async def _is_replaced(self, node: NodeChannel) -> bool:
        """Return whether another node than the silent `node` is used, after a search for one.

        The consumers of quiet topics, perhaps a thousand, call this together. One of them probes.
        """
        now = asyncio.get_running_loop().time
        async with self._search_lock:
            if now() - self._last_stay_s.get(node, -math.inf) < self.settings.stall_s / 4:
                return False
            if node.relays and await self._leader_heard_by(node):
                leader: NodeChannel | None = node
            elif self._leader not in (None, node):
                return True
            else:
                leader = await self._probe_all() or (self._find_relay() if node.relays else None)
            if leader is not None and leader is not node:
                self._use(leader)
                return True
            self._last_stay_s[node] = now()  # after the probes, which may take longer than that
            if leader is None and not node.relays and self._may_try:
                self._leader_probe = asyncio.create_task(self._leave_silent(node))
            return False

    # ---- between the leader and a relay

    @property
    def _may_try(self) -> bool:
        return self._leader_probe is None or self._leader_probe.done()

    async def _leave_silent(self, leader: NodeChannel) -> None:
        """Use a relay instead of the silent leader if that does not answer for RELAYED_SLOW_S."""
        if await self._leader_epoch_of(leader, RELAYED_SLOW_S) >= 0:
            return
        async with self._search_lock:
            found = await self._probe_all() or self._find_relay()
            if found is not None and self._leader is leader:  # no call has left it meanwhile
                self._use(found)

    def _next_return_s(self) -> float:
        return asyncio.get_running_loop().time() + self.rng.uniform(*RETURN_S)

    def _try_to_return(self) -> None:
        """Begin to probe the leader if this client is relayed and it is time to."""
        relay, now_s = self._leader, asyncio.get_running_loop().time()
        if relay is not None and relay.relays and now_s >= self._return_at and self._may_try:
            self._return_at = self._next_return_s()
            self._leader_probe = asyncio.create_task(self._return_to_leader(relay))

    async def _return_to_leader(self, relay: NodeChannel) -> None:
        """Use the leader that a relay knows instead of the relay, if the leader answers."""
        leader = await self._node_if_leading(await self._leader_heard_by(relay))
        if leader is not None and self._leader is relay:
            self._use(leader)

    async def _leader_heard_by(self, relay: NodeChannel) -> str:
        """Return the address of the leader that a relay hears, or is; empty: there is none."""
        with suppress(TimerError):
            status = await self._status_of(relay)
            if _led_epoch(status) >= 0:
                return relay.address
            return status.leader_address if status.hears_leader else ""
        return ""

    async def _leader_named_by(self, address: str, within_s: float) -> str | None:
        """Return the address of the leader that a node names. Empty: none; None: it is silent."""
        try:
            async with asyncio.timeout(within_s):
                return (await self._status_of(self.node(address), within_s)).leader_address
        except TimeoutError:
            return None
        except TimerError:
            return ""

    async def _probe_hint(self) -> NodeChannel | None:
        hint, self._hint = self._hint, ""
        return await self._node_if_leading(hint)

    async def _node_if_leading(self, address: str) -> NodeChannel | None:
        """Return the node at an address if it leads. None: it does not, or is not called."""
        if not address or not (self._calls_others or address in self._addresses):
            return None
        node = self.node(address)
        epoch = await self._leader_epoch_of(node)
        if epoch < self._leader_epoch:
            return None
        self._leader_epoch = epoch
        return node

    async def _probe_all(self) -> NodeChannel | None:
        """Return the leader of the highest epoch, as soon as it answers. None: no node leads."""
        self._denials.clear()
        self._followers.clear()
        addresses = dict.fromkeys([*self._addresses, *self._nodes])
        probes = {
            asyncio.ensure_future(self._leader_epoch_of(self.node(address))): address
            for address in addresses
        }
        best = -1, ""
        pending = set(probes)
        wait_s = max(self.settings.probe_s, self._patience_s)
        try:
            while pending and best[0] < max(self._leader_epoch, 0):
                done, pending = await asyncio.wait(
                    pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    if len(pending) == len(probes):
                        silent = f"{', '.join(addresses)}: no answer within {wait_s:g} s"
                        self.last_error = Unreachable(silent)
                    break
                # All nodes had the same time; a paused node must not delay every round.
                wait_s = max(self.settings.probe_s / 5, self._patience_s)
                best = max(best, *((probe.result(), probes[probe]) for probe in done))
        finally:
            await cancel_and_wait(probes)
        if best[0] < 0:
            self._count_answers(len(addresses))
            return None
        self._leader_epoch = max(self._leader_epoch, best[0])
        return self.node(best[1])

    def _count_answers(self, probe_count: int) -> None:
        """Add to the last error how many nodes answered a round without a leader.

        `probe_count`: number of nodes that were probed.
        """
        if count := len(self._followers):
            verb = "answers" if count == 1 else "answer"
            text = f"{count} of {probe_count} nodes {verb}, none leads"
            self.last_error = Unreachable(
                "; ".join(map(str, filter(None, (text, self.last_error))))
            )
            self.last_error.answered = True

    def _find_relay(self, searched_s: float = math.inf) -> NodeChannel | None:
        """Return a node that relays to a leader out of this client's reach. None: there is none.

        `searched_s`: seconds of the search so far.
        """
        followers = [*self._followers.items()]
        self.rng.shuffle(followers)  # clients spread over the nodes
        newest = max((epoch for _, (_, epoch) in followers), default=0)
        for address, (leader, epoch) in followers:
            if not leader or leader in self._followers or epoch < newest:  # cut off from the others
                continue
            mine = self._calls_others or leader in self._addresses
            after_s = RELAYED_SLOW_S if mine and self._is_slow(leader) else RELAYED_S
            if searched_s >= after_s:
                self._leader_epoch = max(self._leader_epoch, epoch)
                return self._node(address, relays=True)
        return None

    def _is_slow(self, address: str) -> bool:
        """Whether a node did not answer in time. Otherwise its connection failed."""
        trouble = self._probe_errors.get(address)
        failed = trouble and trouble.__cause__
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        return trouble is None or (
            isinstance(failed, grpc.aio.AioRpcError) and failed.code() is late
        )

    def _note_search(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._search_began_s is None or now - self._last_search_s > FORGET_S:
            self._search_began_s = now
        self._last_search_s = now

    @property
    def _searched_s(self) -> float:
        """Seconds since the search for the leader began; 0: the leader is known."""
        since_s = self._search_began_s
        return 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s

    @property
    def _patience_s(self) -> float:
        """Least time for a node's answer: a quarter of the search's duration so far.

        Without it, a leader that is too busy to answer in time would never be found, although it
        serves clients that already know it.
        """
        return min(PATIENCE_S_MAX, self._searched_s / 4)

    async def _status_of(self, node: NodeChannel, least_s: float = 0.0) -> pb.GetStatusResponse:
        """Return a node's own status, not the cluster's. `least_s`: least time for its answer.

        Raises:
            TimerError: It does not answer in time, or rejects the call.
        """
        request = pb.GetStatusRequest(local=True, leadership=True)
        with converting_errors():
            return await node.admin.GetStatus(request, timeout=max(self.settings.probe_s, least_s))

    def _failure_of(self, address: str, error: TimerError) -> Unreachable:
        dates = self._date_error() if isinstance(error, Unreachable) else ""
        return Unreachable(f"{address}: {error}{dates}")

    async def _leader_epoch_of(self, node: NodeChannel, least_s: float = 0.0) -> int:
        """Return the epoch that a node leads; -1: it does not lead, or does not answer."""
        try:
            status = await self._status_of(node, max(least_s, self._patience_s))
        except TimerError as error:
            self._probe_errors[node.address] = error
            self.last_error = self._failure_of(node.address, error)
            if isinstance(error, _DENIALS):
                self._denials[node.address] = error
            elif (
                isinstance(error, Unreachable)
                and not error.retryable
                and self._last_announced is None
            ):
                self.last_error.retryable = False
                self._denials[node.address] = self.last_error
            return -1
        if (epoch := _led_epoch(status)) >= 0:
            return epoch
        self._probe_errors.pop(node.address, None)
        text = f"{node.address} answers, but does not lead"
        if (why := self._probe_errors.get(status.leader_address)) is not None:
            text += f"; the leader is at {status.leader_address}: {why}"
        self.last_error = Unreachable(text)
        leader_heard = status.leader_address if status.hears_leader else ""
        self._followers[node.address] = leader_heard, status.epoch
        if status.leader_address and status.leader_address not in self._nodes:
            self._hint = status.leader_address  # of a node that joined later
        return -1

    # ---- calls

    async def attempt(self, node: NodeChannel, call: Callable[[], Awaitable[T]]) -> T:
        """Return the response of one unary call; leave a silent node if another is used.

        Raises:
            TimerError: The call failed. LeadershipLost: see `check`.
        """
        task = asyncio.ensure_future(_await_call(call))
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self.settings.stall_s)
                if done:
                    return task.result()
                await self.check(node, silent=True, free=False)
        except asyncio.CancelledError:
            if self._leader is node:  # it was silent until the call's time was up: perhaps for good
                self._leader = None
            raise
        finally:
            await cancel_and_wait([task])

    async def call(
        self,
        method: Method[T],
        *,
        within_s: float,
        repeatable: bool = True,
        repeat_s: float = math.inf,
        on_doubt: Callable[[], None] = lambda: None,
        at_once: tuple[type[TimerError], ...] = (),
    ) -> T:
        """Return the leader's response to a unary call; retry it through failovers.

        Args:
            method: The call.
            within_s: Seconds that it may take in total.
            repeatable: It may be applied twice without harm.
            repeat_s: Seconds after the first attempt that may have been applied in which it may be
                retried. Time in which the machine sleeps counts, too.
            on_doubt: Called when the response of an attempt that may have been applied is lost.
            at_once: Errors that are raised without a retry, if no attempt is in doubt.

        Raises:
            OutcomeUnknown: No response in time; the call may have been applied.
            Unreachable: No response in time; the call was certainly not applied.
            TimerError: The call was rejected.
        """
        pauses = RetryPauses(self.settings, self.rng)
        now = self.loop().time
        ends_s, repeat_until_s = now() + within_s, math.inf
        in_doubt = asking = False
        last: TimerError | None = None
        try:
            async with asyncio.timeout_at(ends_s) as patience:
                while True:
                    try:
                        node = await self.leader(denied=not in_doubt)
                    except TimerError as error:
                        raise (errors.as_unknown(error) if in_doubt else error) from None
                    if not in_doubt:
                        repeat_until_s = boot_time_s() + repeat_s
                    until_s = min(ends_s, now() + repeat_until_s - boot_time_s())
                    patience.reschedule(until_s)
                    call = partial(method, node, deadline_s(until_s - now()))
                    asking = True
                    try:
                        answer = await self.attempt(node, call)
                    except TimerError as error:
                        asking = False
                        if not error.outcome_known or isinstance(error, Closed):
                            in_doubt = True
                            on_doubt()
                        is_retried = errors.means_move(error) or errors.means_wait(error)
                        is_retried &= in_doubt or not isinstance(error, at_once)
                        if is_retried:
                            self.on_failure(node, error)
                        if not is_retried or (in_doubt and not repeatable):
                            if in_doubt:
                                errors.as_unknown(error)
                            raise
                        if not in_doubt:
                            patience.reschedule(ends_s)
                        last = error
                        pause_ms = error.retry_after_ms
                    else:
                        self.last_error = None
                        return answer
                    await asyncio.sleep(pauses.take(pause_ms / 1000))
        except TimeoutError:
            sent = in_doubt or asking
            given_s = min(within_s, repeat_s) if sent else within_s
            raise timeout_error(given_s, last or self.last_error, sent=sent) from None

    async def anywhere(
        self,
        method: Method[T],
        *,
        within_s: float,
        rank: Callable[[T], int],
        final: tuple[type[TimerError], ...],
    ) -> T:
        """Call each address once; return the first response of rank RANK_MAX, else the highest.

        Nodes that are not ready are asked for the leader, until one names it or is silent. A leader
        at another address is called, too. Each of these calls takes at most `within_s`.

        Raises:
            Unreachable: No node answers, or none can serve the call now.
            PermissionDenied, TokenRejected: Every node denies the call.
            TimerError: One of the classes `final`, which each node would answer.
        """
        self.loop()
        each_s = min(within_s, self.settings.stall_s)
        best: list[T] = []
        denials: list[TimerError] = []
        named: str | None = ""
        refusal, addresses = "", [*self._addresses]
        for address in addresses:
            try:
                async with asyncio.timeout(each_s):
                    call = partial(method, self.node(address), deadline_s(each_s))
                    answer = await _await_call(call)
                if rank(answer) == RANK_MAX:
                    return answer
                best = [max([*best, answer], key=rank)]
            except TimeoutError:
                self.last_error = Unreachable(f"{address}: no answer within {each_s:g} s")
            except final:
                raise
            except TimerError as error:
                self.last_error = self._failure_of(address, error)
                denials += [error] if isinstance(error, _DENIALS) else []
                if isinstance(error, NotReady):
                    if self._calls_others and named == "":
                        named = await self._leader_named_by(address, each_s)
                        addresses += [named] if named and named not in addresses else []
                    refusal = f"{address}: {error}"
        if best:
            return best[0]
        if len(denials) == len(addresses):
            raise denials[0]
        if refusal:  # it says more than a node that is down
            failure = Unreachable(f"no node can serve the call now; {refusal}")
            failure.answered = True
            raise failure
        text = f"no node answers; the last error: {self.last_error}"
        raise Unreachable(text)


def deadline_s(left_s: float) -> float:
    """Return a node's deadline, in seconds, for a call that has `left_s` left.

    Raises:
        TimeoutError: No time is left.
    """
    if left_s <= 0:
        raise TimeoutError
    return min(left_s + NODE_MARGIN_S, DEADLINE_S_MAX)


def timeout_error(
    within_s: float, last: TimerError | None, *, sent: bool, lost: str = ""
) -> TimerError:
    """Return the error of a call whose time is up.

    `lost`: the error that ended the connection on which the call was sent; empty: none did.
    """
    why = f"; the last error: {last}" if last is not None else ""
    if sent:
        first = f"; the connection was lost: {lost}" if lost not in {"", str(last)} else ""
        error: TimerError = OutcomeUnknown(f"no answer within {within_s:g} s{first}{why}")
    elif isinstance(last, errors.Overloaded | errors.DiskFull):
        error = type(last)(f"not accepted within {within_s:g} s{why}")
    else:
        error = Unreachable(f"not accepted within {within_s:g} s{why}")
        error.answered = last.answered if isinstance(last, Unreachable) else last is not None
    error.__cause__ = last
    return error


@contextmanager
def converting_errors() -> Iterator[None]:
    """Raise gRPC's failures as TimerErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from error
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        text = f"the stream is over: {error}"
        raise ConnectionLost(text) from error
    except asyncio.CancelledError:
        # grpc.aio raises this error also if the call's channel was closed here.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionLost("the connection was closed") from None


async def write(stream: Any, message: Any) -> None:
    """Write to a stream.

    Raises:
        ConnectionLost: The stream is over. Only its reader gets the status; grpc.aio reports an
            internal error to the writer.
    """
    try:
        with converting_errors():
            await stream.write(message)
    except TimerError as error:
        raise ConnectionLost("the stream broke") from error


def _led_epoch(status: pb.GetStatusResponse) -> int:
    """Return the epoch that a node leads, by its own status; -1: none."""
    led = (int(one.epoch) for one in status.nodes if one.role == "leader" and one.serving)
    return next(led, -1)


async def _await_call(call: Callable[[], Awaitable[T]]) -> T:
    with converting_errors():
        return await call()


async def cancel_and_wait(tasks: Any) -> None:
    """Cancel tasks, and wait until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_to_end(*parts: Coroutine[Any, Any, None]) -> None:
    """Run the parts concurrently until one ends; cancel the others; raise that one's error."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(tasks)
    for task in done:
        task.result()


@asynccontextmanager
async def closing_call(call: Any) -> AsyncIterator[Any]:
    """Cancel a streaming call at the end of the block."""
    try:
        yield call
    finally:
        call.cancel()
