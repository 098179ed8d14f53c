"""The paths of the status page, all of them GET. None of them changes the state.

    /                        the page; it polls the overview every 2 s
    /page/status_page.css    its style
    /page/status_page.js     its program
    /v1/overview             everything that the page shows without a search
    /v1/topics               a page of topics: ?prefix=&after=&size= (20 topics; at most 100)
    /v1/timer                one timer and its story: ?id=, or ?topic=&key=

Times are Unix milliseconds, unless a name says otherwise. `/v1/overview` returns:

    cluster_id, epoch, leader, controller    empty: unknown
    viewed           the node that answers
    clock_ms         the cluster's clock
    nodes            [name, address, http_address, reachable, error, role (also unreachable; asked:
                     no answer yet); if reachable also:
                     serving, epoch, log_end, commit_index, applied_index, uptime_ms, memory, disk,
                     lag_entries: of the log, behind the node that answers,
                     checkpoint: {index, applied_index, last_read_time_ms, age_ms, manifest_index,
                     runs, digest: at digest_index, that of the shared checkpoint: equal, differs,
                     not_applied or unknown}]
    shared           {epoch, index, last_read_time_ms, digest, published_at_ms, age_ms}, or null
    figures_of       the node that has the counters, lateness and lags below: the leader, as far as
                     it answers, otherwise the node that answers
    figures_error    why they are not the leader's; empty: they are
    counters         at_ms on a monotonic clock; scheduled, fired, cancelled; of a leader also
                     delivered, redelivered, acked. For rates: compare two answers
    lateness         bounds_ms, and counts per bound of firings and of first deliveries
    pending          total, ready, topics; counts of buckets_s: overdue, up to a bound, later. Null:
                     not counted yet. exact, held (in overdue), age_ms
    lags             {topics, groups} with most lag, 20 each, then 20 groups `dead-letters`; null:
                     not known, or not searched yet. lags_age_ms
    changes          [epoch, leader, time_ms, reason, earlier]: the last 20, newest first

`/v1/topics` returns topics, count (of all that match; null for a caller that may see some topics
only) and next_after; empty: no more. `/v1/timer`
returns timer_id, state, topic, due_ms, held, successor_id, of a pending timer also requested_ms,
key and payload_bytes, and its story: events, log_first, log_last, gaps. Errors are problem+json,
as on the other `/v1` paths.

The page loads nothing from elsewhere, and runs no script but its own: CONTENT_POLICY.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cluster.api.topic_filter import filter_of_observer
from cluster.page.page_data import PageData
from cluster.rpc.aiohttp_server import web
from cluster.rpc.http import ANSWER_TIMEOUT_S, json_answer, with_known_parameters
from cluster.rpc.http_api import IDENTITY, RULES, HttpApi, context_of
from cluster.rpc.http_routes import PAGE_READERS

CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
QUERY_CHARS_MAX: Final = 4_096
"""Characters of one field of a query; longer ones are cut, and then match nothing."""

_FILES: Final = {
    "/": ("status_page.html", "text/html"),
    "/page/status_page.css": ("status_page.css", "text/css"),
    "/page/status_page.js": ("status_page.js", "text/javascript"),
}


class StatusPages:
    """The page and its JSON, see the module, and the API. One `HttpServer` serves the routes."""

    def __init__(self, answers: PageData, api: HttpApi | None = None) -> None:
        """`api`: the RPC routes under /v1. None: without them."""
        self._answers, self._api = answers, api

    def routes(self) -> Sequence[web.RouteDef]:
        """Return all routes."""
        readers = {"overview": self._overview, "topics": self._topics, "timer": self._timer}
        return [
            *(web.get(path, _file(*found)) for path, found in _FILES.items()),
            *(
                web.get(each.path, with_known_parameters(each, readers[each.reader]))
                for each in PAGE_READERS
            ),
            *(self._api.routes() if self._api is not None else ()),
        ]

    async def close(self) -> None:
        """End all work; the server has stopped."""
        await self._answers.close()

    async def _overview(self, _: web.Request) -> web.Response:
        return await _json(self._answers.overview)

    async def _topics(self, request: web.Request) -> web.Response:
        fields = _fields(request, "prefix", "after", "size")
        rules = request.get(RULES)  # with TLS
        shown = None if rules is None else filter_of_observer(rules, request[IDENTITY])
        return await _json(lambda: self._answers.topics(**fields, shown=shown))

    async def _timer(self, request: web.Request) -> web.Response:
        fields = _fields(request, "id", "topic", "key")
        timer_id = fields.pop("id")
        context = context_of(request, ANSWER_TIMEOUT_S)

        async def read() -> Mapping[str, Any]:
            if self._api is not None:
                self._api.check_origin(request)
            # A task of its own: the guard of the calls notes the caller in the task's context.
            work = self._answers.timer(timer_id=timer_id, context=context, **fields)
            return await asyncio.create_task(work)

        return await _json(read)


def _fields(request: web.Request, *names: str) -> dict[str, str]:
    return {name: request.query.get(name, "")[:QUERY_CHARS_MAX] for name in names}


async def _json(read: Callable[[], Awaitable[Mapping[str, Any]]]) -> web.Response:
    answer = await json_answer(read)
    answer.headers.update(HEADERS)
    return answer


def _file(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler of a file of this package, which is read once."""
    body = Path(__file__).with_name(name).read_bytes()

    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=HEADERS)

    return handle
