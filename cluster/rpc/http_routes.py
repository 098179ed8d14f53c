"""The paths under /v1 of the HTTP port, as one table. Routes and the OpenAPI document come from it.

A route has either an RPC or a reader. An RPC route builds the request of its gRPC method from the
path, the query and the body, and passes the same rules, limits, relay and audit log as over gRPC.
Its JSON is that of the contract, or that of its form: those for applications have forms. A reader
answers from the state of the node at hand: it needs `observe` with all topics, or is filtered.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.security.method_rules import CONTRACT_RULES
from timer.model.timer_errors import InvalidRequestError

CHANGE_S: Final = 15.0
"""Seconds for the answer of an RPC route, except where the table gives others."""

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
RECEIVE_S: Final = 35.0
"""Likewise, for one that waits up to 20 s for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    """One row of the table."""

    verb: str
    path: str
    """Its {names} are fields of the request."""
    summary: str
    rpc: str = ""
    """Method of the public services; empty: `reader` answers."""
    form: str = ""
    """Name of its form in route_forms.py; empty: JSON of the contract's messages."""
    reader: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    """Name of a parameter -> its description. Of an RPC: fields of the request."""
    name: str = ""
    """Name of the operation of a reader, or without a form if it is not that of the RPC."""
    inner: str = ""
    """The names in the path are fields of this field of the request. Empty: of the request."""
    answer: str = ""
    """Message of the answer; empty: that of the RPC, or any object."""
    first_of: str = ""
    """The answer is the first element of this field."""
    timeout_s: float = CHANGE_S
    media: str = JSON
    """Content type of the request and the answer."""
    is_filtered: bool = False
    """A reader that shows a caller with rules for some topics those topics."""
    calls: bool = False
    """A reader that calls public methods for its caller. An RPC route does so in any case."""
    is_private: bool = False
    """A page of another origin must not read the answer; see http_api.py."""

    @property
    def operation(self) -> str:
        """The name of the operation, which no other route has."""
        return self.form or self.name or self.rpc

    @property
    def is_change(self) -> bool:
        """Whether the request may change the cluster."""
        return self.verb != "GET"

    @property
    def permission(self) -> str:
        """The permission that a caller needs with TLS."""
        if not self.rpc:
            return "observe" if self.is_filtered else "observe, for all topics"
        return str(CONTRACT_RULES[self.rpc].permission or "any rule")

    def parameters(self, given: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return the parameters of a request's query.

        Raises:
            InvalidRequestError: the path does not take one of them, or one is given twice.
        """
        found: dict[str, str] = {}
        for name, value in given:
            if name not in self.query:
                known = ", ".join(self.query) or "no parameters"
                raise InvalidRequestError(name, value, f"is not known: this path takes {known}")
            if name in found:
                raise InvalidRequestError(name, value, "must be given once")
            found[name] = value
        return found


_TOPIC: Final = "/v1/topics/{topic}"
_GROUP: Final = f"{_TOPIC}/groups/{{group}}"
_TIMERS: Final = f"{_TOPIC}/timers"
_TIMER: Final = "/v1/timers/{id}"
_KEY: Final = f"{_TOPIC}/keys/{{key}}"
_ONE_SERIES: Final = f"{_TOPIC}/series/{{key}}"
_FILTER: Final = {
    "due_from": "effective due time at or after this one, as in RFC 3339",
    "due_from_ms": "likewise, in Unix milliseconds",
    "due_to": "before this time, as in RFC 3339",
    "due_to_ms": "likewise, in Unix milliseconds",
    "key_prefix": "the beginning of the keys",
}
_FILTER_PAGE: Final = {"page_token": "next_page_token of the page before, with the same filter"}
_SERIES_PAGE: Final = {
    "page_size": "1 to 100; default: 100",
    "page_token": "next_page_token of the page before",
}
SCOPES: Final = ("node", "cluster")
_SCOPE: Final = {"scope": "cluster: with the answers of all nodes; node, the default: of this one"}

READERS: Final = (
    HttpRoute(
        verb="GET",
        path="/v1/status",
        reader="status",
        name="GetStatus",
        summary="Roles, positions and counters of this node, or of all",
        query=_SCOPE,
        answer="GetStatusResponse",
    ),
    HttpRoute(
        verb="GET",
        path="/v1/checkpoint",
        reader="checkpoint",
        name="GetCheckpoint",
        summary="The checkpoint of this node, or of all, and the shared checkpoint",
        query=_SCOPE,
        answer="GetCheckpointResponse",
    ),
    HttpRoute(
        verb="GET",
        path="/v1/policies",
        reader="policies",
        name="GetPolicies",
        summary="The policies of a scope, as this node has applied them",
        query={"namespace": "a namespace", "topic": "a topic; neither: the cluster"},
        answer="DescribePoliciesResponse",
    ),
    HttpRoute(
        verb="GET",
        path="/v1/openapi.json",
        reader="openapi",
        name="GetOpenapi",
        summary="This document",
    ),
)
"""Answered by every HTTP server."""
PAGE_READERS: Final = (
    HttpRoute(
        verb="GET",
        path="/v1/overview",
        reader="overview",
        name="GetOverview",
        summary="Everything that the status page shows without a search",
    ),
    HttpRoute(
        verb="GET",
        path="/v1/topics",
        reader="topics",
        name="ListTopics",
        summary="A page of topics by name, as this node has applied them",
        query={
            "prefix": "the beginning of the names",
            "after": "next_after of the page before",
            "size": "topics in the page: 1 to 100; default: 20",
        },
        is_filtered=True,
    ),
    HttpRoute(
        verb="GET",
        path="/v1/timer",
        reader="timer",
        name="FindTimer",
        summary="One timer and its story, from the leader",
        query={"id": "the timer's id, or:", "topic": "its topic", "key": "and its key"},
        calls=True,
    ),
)
"""Answered by the status page."""
ADMIN_ROUTES: Final = (
    HttpRoute(
        verb="GET",
        path="/v1/members",
        rpc="ListMembers",
        summary="The voters, and the learners that answer",
    ),
    HttpRoute(
        verb="POST",
        path="/v1/members",
        rpc="ChangeMembers",
        summary="Add, replace or remove one voter",
        timeout_s=60.0,
    ),
    HttpRoute(
        verb="POST",
        path="/v1/leadership/transfer",
        rpc="TransferLeadership",
        summary="Transfer the leadership to a node, or to any other",
    ),
    HttpRoute(
        verb="POST",
        path="/v1/nodes/{node}/drain",
        rpc="DrainNode",
        summary="Give the leadership of a node away, and keep it from leading; or undo that",
    ),
    HttpRoute(
        verb="POST",
        path="/v1/nodes/{node}/reload",
        rpc="ReloadFiles",
        summary="Look at once at a node's certificates, authorities and rules of access",
    ),
    HttpRoute(
        verb="POST",
        path="/v1/verification",
        rpc="BeginVerification",
        summary="Let all nodes, or one, read all their files now; a pass that runs is joined",
    ),
    HttpRoute(
        verb="GET",
        path="/v1/verification",
        rpc="GetVerification",
        summary="The last pass of each node over its files, and whether their states agree",
        query={"at_index": "a checkpoint, for the digests; default: the shared checkpoint"},
    ),
    HttpRoute(
        verb="POST",
        path="/v1/nodes/{node}/verification",
        rpc="BeginVerification",
        name="BeginNodeVerification",
        summary="Let a node read all its files now; a pass that runs is joined",
    ),
    HttpRoute(
        verb="GET",
        path="/v1/nodes/{node}/verification",
        rpc="GetVerification",
        name="GetNodeVerification",
        summary="The last pass of a node over its files, and the digest of its state",
        query={"at_index": "a checkpoint, for the digest; default: the shared checkpoint"},
    ),
    HttpRoute(
        verb="PUT",
        path="/v1/nodes/{node}/log-level",
        rpc="SetLogLevel",
        summary="Set the level of a logger of a node, or of all its loggers, until it restarts",
    ),
    HttpRoute(
        verb="GET",
        path="/v1/nodes/{node}/stacks",
        rpc="DumpStacks",
        summary="The stacks of a node's threads and tasks",
        is_private=True,
    ),
    HttpRoute(
        verb="PATCH",
        path="/v1/policies",
        rpc="AlterPolicies",
        summary="Set and unset fields of the policy of one scope",
    ),
    HttpRoute(
        verb="GET",
        path=_TOPIC,
        rpc="ListTopics",
        name="GetTopic",
        summary="One topic with its groups, from the leader",
        query={"lateness": "true: with the histograms of lateness"},
        first_of="topics",
        answer="TopicStatus",
    ),
    HttpRoute(
        verb="PUT",
        path=_TOPIC,
        rpc="CreateTopic",
        summary="Create a topic; an existing one stays as it is",
    ),
    HttpRoute(
        verb="DELETE",
        path=_TOPIC,
        rpc="DeleteTopic",
        summary="Delete a topic with its timers, messages and groups",
    ),
    HttpRoute(
        verb="GET",
        path=f"{_TOPIC}/messages",
        rpc="Peek",
        name="PeekMessages",
        summary="Messages of a topic or a group with their payloads, shown without a delivery",
        query={
            "group": "its unacked messages with their states; default: all that the topic keeps",
            "from_offset": "the first queue offset; default: 0",
            "max_messages": "1 to 100; default: 10; about a mebibyte at most",
        },
        is_private=True,
    ),
    HttpRoute(
        verb="PUT",
        path=_GROUP,
        rpc="CreateGroup",
        summary="Create a group, and its topic; an existing group stays as it is",
    ),
    HttpRoute(
        verb="PATCH",
        path=_GROUP,
        rpc="AlterGroup",
        summary="Change settings of a group",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_GROUP}/seek",
        rpc="SeekGroup",
        summary="Move a group to another message that its topic keeps",
    ),
    HttpRoute(
        verb="DELETE",
        path=_GROUP,
        rpc="DeleteGroup",
        summary="Delete a group",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TOPIC}/redrive",
        rpc="Redrive",
        summary="Send dead letters back to the topics from which they came",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TOPIC}/redrive/letters",
        rpc="RedriveLetters",
        summary="Send chosen dead letters back to the topics from which they came",
    ),
)
"""Answered by the methods of the public services: the administration."""
APPLICATION_ROUTES: Final = (
    HttpRoute(
        verb="POST",
        path=_TIMERS,
        rpc="Schedule",
        form="ScheduleTimer",
        summary="Schedule a timer",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TIMERS}/batch",
        rpc="Schedule",
        form="ScheduleTimers",
        summary="Schedule timers, all or none",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TIMERS}/stream",
        rpc="ScheduleStream",
        form="StreamTimers",
        summary="Schedule a timer for each line; each has a line in the answer",
        media=NDJSON,
    ),
    HttpRoute(
        verb="GET",
        path=_TIMERS,
        rpc="ListTimers",
        form="ListPendingTimers",
        summary="Pending timers in the order in which they fire, page by page",
        query={**_FILTER, "page_size": "1 to 1000; default: 100", **_FILTER_PAGE},
        is_private=True,
    ),
    HttpRoute(
        verb="GET",
        path=f"{_TIMERS}/count",
        rpc="CountTimers",
        form="CountPendingTimers",
        summary="How many timers are pending, and how soon they are due; or how many of a filter",
        query={**_FILTER, **_FILTER_PAGE},
    ),
    HttpRoute(
        verb="GET",
        path=_TIMER,
        rpc="GetTimer",
        form="ShowTimer",
        summary="Show a timer by its id",
        is_private=True,
    ),
    HttpRoute(
        verb="DELETE",
        path=_TIMER,
        rpc="Cancel",
        form="CancelTimer",
        summary="Cancel a timer by its id",
    ),
    HttpRoute(
        verb="PATCH",
        path=_TIMER,
        rpc="Reschedule",
        form="RescheduleTimer",
        summary="Give a timer by its id another due time, and a new id",
    ),
    HttpRoute(
        verb="POST",
        path="/v1/timers/cancel",
        rpc="Cancel",
        form="CancelTimers",
        summary="Cancel timers of any topics by their ids; each has a result",
    ),
    HttpRoute(
        verb="POST",
        path="/v1/timers/reschedule",
        rpc="Reschedule",
        form="RescheduleTimers",
        summary="Give timers by their ids other due times, and new ids; each has a result",
    ),
    HttpRoute(
        verb="GET",
        path=_KEY,
        rpc="GetTimer",
        form="ShowTimerByKey",
        summary="Show the pending timer with a key",
        is_private=True,
    ),
    HttpRoute(
        verb="DELETE",
        path=_KEY,
        rpc="Cancel",
        form="CancelTimerByKey",
        summary="Cancel the pending timer with a key",
    ),
    HttpRoute(
        verb="PATCH",
        path=_KEY,
        rpc="Reschedule",
        form="RescheduleTimerByKey",
        summary="Give the pending timer with a key another due time, and a new id",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TOPIC}/keys/cancel",
        rpc="Cancel",
        form="CancelTimersByKey",
        summary="Cancel the pending timers with some keys; each has a result",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TOPIC}/keys/reschedule",
        rpc="Reschedule",
        form="RescheduleTimersByKey",
        summary="Give the pending timers with some keys other due times; each has a result",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TIMERS}/cancel",
        rpc="Cancel",
        form="CancelTimersByFilter",
        summary="Cancel the pending timers that a filter selects, page by page",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TIMERS}/reschedule",
        rpc="Reschedule",
        form="RescheduleTimersByFilter",
        summary="Give the pending timers that a filter selects one due time, page by page",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_GROUP}/receive",
        rpc="Receive",
        form="ReceiveMessages",
        summary="Lease messages, or wait for the first; the group is created if it does not exist",
        timeout_s=RECEIVE_S,
    ),
    HttpRoute(
        verb="POST",
        path=f"{_GROUP}/ack",
        rpc="Ack",
        form="AckMessages",
        summary="Acknowledge messages of a receive",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_GROUP}/nack",
        rpc="Nack",
        form="NackMessages",
        summary="Return messages of a receive to their group",
    ),
    HttpRoute(
        verb="POST",
        path=f"{_GROUP}/extend",
        rpc="Extend",
        form="ExtendMessages",
        summary="Extend the lease of messages of a receive",
    ),
    HttpRoute(
        verb="GET",
        path=f"{_TOPIC}/queue",
        rpc="ReadMessages",
        form="ReadMessages",
        summary="Fired messages of a topic by their queue offsets, read without a lease",
        query={
            "from_offset": "the first queue offset; default: 0",
            "end_offset": "only messages below this offset; default: no limit",
            "max_messages": "1 to 1000; default: 100; about a mebibyte at most",
        },
        is_private=True,
    ),
    HttpRoute(
        verb="PUT",
        path=_ONE_SERIES,
        rpc="CreateSeries",
        form="CreateSeries",
        summary="Create a series of recurring timers; an equal one stays as it is",
    ),
    HttpRoute(
        verb="GET",
        path=_ONE_SERIES,
        rpc="GetSeries",
        form="ShowSeries",
        summary="Show a series and its next times",
        query={"next_times": "how many next times to show: 0 to 100; default: 0"},
        is_private=True,
    ),
    HttpRoute(
        verb="PATCH",
        path=_ONE_SERIES,
        rpc="AlterSeries",
        form="AlterSeries",
        summary="Change, pause or resume a series",
    ),
    HttpRoute(
        verb="DELETE",
        path=_ONE_SERIES,
        rpc="DeleteSeries",
        form="DeleteSeries",
        summary="Delete a series, and cancel its pending occurrence",
    ),
    HttpRoute(
        verb="GET",
        path=f"{_TOPIC}/series",
        rpc="ListSeries",
        form="ListSeries",
        summary="The series of a topic in the order of their creation, page by page",
        query=_SERIES_PAGE,
        is_private=True,
    ),
    HttpRoute(
        verb="GET",
        path="/v1/series",
        rpc="ListSeries",
        form="ListAllSeries",
        summary="The series of all topics in the order of their creation, page by page",
        query=_SERIES_PAGE,
        is_private=True,
    ),
    HttpRoute(
        verb="POST",
        path=f"{_TOPIC}/series/preview",
        rpc="CreateSeries",
        form="PreviewSeries",
        summary="The next times of a series that is not created",
    ),
    HttpRoute(
        verb="GET",
        path=f"{_TOPIC}/policies",
        rpc="DescribePolicies",
        summary="The policy of a topic, from the leader",
        inner="scope",
    ),
    HttpRoute(
        verb="PATCH",
        path=f"{_TOPIC}/policies",
        rpc="AlterPolicies",
        name="AlterTopicPolicies",
        summary="Set and unset fields of the policy of a topic",
        inner="scope",
    ),
)
"""As the others, for applications: schedule, look up, change and consume."""
RPC_ROUTES: Final = (*APPLICATION_ROUTES, *ADMIN_ROUTES)
"""Answered by the methods of the public services. The server tries their paths in this order: the
most frequent one comes first."""
ROUTES: Final = (*READERS, *PAGE_READERS, *RPC_ROUTES)
FILTERED_PATHS: Final = frozenset(each.path for each in ROUTES if each.is_filtered)
RPC_PATHS: Final = frozenset((each.verb, each.path) for each in RPC_ROUTES)
"""Routes that check the access rules of their method themselves."""
CALLING_PATHS: Final = RPC_PATHS | {
    (verb, each.path) for each in ROUTES if each.calls for verb in ("GET", "HEAD")
}
"""Routes whose calls of methods count for the limits of the caller."""
