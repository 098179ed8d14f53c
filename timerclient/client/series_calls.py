"""The client's calls about recurring timers: create, change, pause, delete and show series."""

from collections.abc import Sequence
from datetime import datetime
from typing import Unpack

from timerclient.client.timer_calls import Q, Rpc, Seconds, T
from timerclient.client.topic_calls import TopicCalls
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows, series_fields
from timerclient.rows.series_fields import Series, SeriesConflict, SeriesOptions
from timerclient.values.codecs import NO_VALUE, Payload
from timerclient.values.errors import InvalidRequest


class SeriesCalls(TopicCalls):
    """Calls about series, for an event loop. Topic and key name a series."""

    async def create_series(
        self,
        topic: str,
        key: str,
        payload: Payload | None = None,
        *,
        json: object = NO_VALUE,
        on_conflict: SeriesConflict = "reject",
        timeout: Seconds | None = None,
        **options: Unpack[SeriesOptions],
    ) -> Series:
        """Create a series of recurring timers; return it. A repeat returns the existing series.

        If a series of another definition has the key, `on_conflict` decides: "reject" raises
        AlreadyExists, "alter" gives it this definition. So an application can declare its series at
        each start. Options that are not given get their defaults, except that a paused series stays
        paused, and without `start` the start stays.

        Args:
            topic: The topic of the occurrences. It is created if the cluster allows that.
            key: One series of the topic has it. Keys of single timers are others.
            payload: Payload of each occurrence, bytes. None: empty.
            json: A value for the payload instead, encoded as JSON.
            options: `every=` or `cron=`, and others: see SeriesOptions.

        Raises:
            InvalidRequest: An argument exceeds a limit.
            AlreadyExists: A series with another definition has the key.
            QuotaReached: The cluster has the most series that it may have.
            OutcomeUnknown: No answer in time; call it again.
        """
        fields = series_fields.fields_of(options, payload, json)
        request = pb.CreateSeriesRequest(
            topic=rows.name("topic", topic),
            key=rows.name("key", key),
            fields=fields,
            alter=rows.choice("on_conflict", on_conflict, series_fields.CONFLICTS),
        )
        answer = await self._series_call(lambda node: node.timers.CreateSeries, request, timeout)
        return series_fields.series_of(answer.series)

    async def preview_series(
        self,
        topic: str,
        count: int = 5,
        *,
        timeout: Seconds | None = None,
        **options: Unpack[SeriesOptions],
    ) -> list[datetime]:
        """Return the next times of a series that is not created, 1 to 100.

        Raises:
            InvalidRequest: An argument exceeds a limit.
        """
        request = pb.CreateSeriesRequest(
            topic=rows.name("topic", topic),
            key="preview",
            fields=series_fields.fields_of(options),
            preview=rows.whole_number("count", count, 1, 100),
        )
        answer = await self._series_call(lambda node: node.timers.CreateSeries, request, timeout)
        return [rows.moment_of(each) for each in answer.next_ms]

    async def alter_series(
        self,
        topic: str,
        key: str,
        payload: Payload | None = None,
        *,
        json: object = NO_VALUE,
        timeout: Seconds | None = None,
        **options: Unpack[SeriesOptions],
    ) -> Series:
        """Change the given fields of a series; return it.

        The pending occurrence is cancelled, and planned again. No time before a change of `every`,
        `cron`, `zone` or `start` counts as missed.

        Args:
            payload: Another payload, bytes. None: as it is.
            json: A value for the payload instead, encoded as JSON.
            options: See SeriesOptions. `cron` replaces `every`, and the reverse.

        Raises:
            InvalidRequest: An argument exceeds a limit, or none is given.
            NotFound: There is no such topic or series.
            OutcomeUnknown: No answer in time; the series may be changed.
        """
        return await self._alter(
            topic, key, series_fields.fields_of(options, payload, json), timeout
        )

    async def pause_series(self, topic: str, key: str, *, timeout: Seconds | None = None) -> Series:
        """Pause a series: its pending occurrence is cancelled. Return it.

        Raises:
            NotFound: There is no such topic or series.
        """
        return await self._alter(topic, key, pb.SeriesFields(paused=True), timeout)

    async def resume_series(
        self, topic: str, key: str, *, timeout: Seconds | None = None
    ) -> Series:
        """Resume a series; its `misfire` decides about the times in the pause. Return it.

        Raises:
            NotFound: There is no such topic or series.
        """
        return await self._alter(topic, key, pb.SeriesFields(paused=False), timeout)

    async def delete_series(self, topic: str, key: str, *, timeout: Seconds | None = None) -> None:
        """Delete a series, and cancel its pending occurrence. Messages that fired stay.

        Raises:
            NotFound: There is no such topic or series.
        """
        request = pb.DeleteSeriesRequest(topic=rows.name("topic", topic), key=rows.name("key", key))
        await self._delete(lambda node: node.timers.DeleteSeries, request, timeout)

    async def get_series(self, topic: str, key: str, *, timeout: Seconds | None = None) -> Series:
        """Return a series.

        Raises:
            NotFound: There is no such topic or series.
        """
        answer = await self._get_series(topic, key, 0, timeout)
        return series_fields.series_of(answer.series)

    async def next_occurrences(
        self, topic: str, key: str, count: int = 5, *, timeout: Seconds | None = None
    ) -> list[datetime]:
        """Return the next times of a series, 1 to 100; the pending occurrence first.

        A paused series shows the times that it has if it is resumed now.

        Raises:
            InvalidRequest: `count` is out of range.
            NotFound: There is no such topic or series.
        """
        answer = await self._get_series(
            topic, key, rows.whole_number("count", count, 1, 100), timeout
        )
        return [rows.moment_of(each) for each in answer.next_ms]

    async def list_series(
        self, topic: str = "", *, timeout: Seconds | None = None
    ) -> Sequence[Series]:
        """Return the series of a topic, in the order of their creation; "": of all topics.

        The call sends a request for each 1,000 series; `timeout` applies to each request.

        Raises:
            NotFound: There is no such topic.
        """
        found: list[Series] = []
        request = pb.ListSeriesRequest(topic=rows.text("topic", topic), page_size=1_000)
        while True:
            answer = await self._series_call(lambda node: node.timers.ListSeries, request, timeout)
            found += map(series_fields.series_of, answer.series)
            if not answer.more:
                return found
            request.after_id = answer.series[-1].series_id

    async def _get_series(
        self, topic: str, key: str, times: int, timeout: Seconds | None
    ) -> pb.GetSeriesResponse:
        request = pb.GetSeriesRequest(
            topic=rows.name("topic", topic), key=rows.name("key", key), next_times=times
        )
        return await self._series_call(lambda node: node.timers.GetSeries, request, timeout)

    async def _alter(
        self, topic: str, key: str, fields: pb.SeriesFields, timeout: Seconds | None
    ) -> Series:
        request = pb.AlterSeriesRequest(
            topic=rows.name("topic", topic), key=rows.name("key", key), fields=fields
        )
        answer = await self._series_call(lambda node: node.timers.AlterSeries, request, timeout)
        return series_fields.series_of(answer.series)

    async def _series_call(self, rpc: Rpc[Q, T], request: Q, timeout: Seconds | None) -> T:
        """Call the leader; all of these calls may be repeated."""
        try:
            return await self._call(rpc, request, timeout)
        except InvalidRequest as error:
            raise series_fields.as_given(error) from None
