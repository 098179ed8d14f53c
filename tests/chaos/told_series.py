"""A series whose occurrences lie, for the audit's one run."""

from typing import Any

from chaos.history.history import OpOutcome, payload_of
from tests.chaos.told_history import ToldHistory
from tests.chaos.world import Story, id_of
from timer.entries.series_payloads import CreateSeries, DeleteSeries
from timer.model.recurrence import Misfire, SeriesSpec
from timer.model.units import UnixMs

OK = OpOutcome.OK


MARK = 77_000_001
"""In the payload of all occurrences; no other timer has it."""


DUE_MS = {1: 1000, 2: 2000, 3: 3500, 4: 5100, 5: 5100, 6: 6000, 7: 7000}


PLANNED_MS = DUE_MS | {4: 4000, 5: 5000}


TOLD = {1: (1, 1), 2: (9, 4), 3: (9, 3), 4: (1, 4), 6: (1, 1)}
"""Number of an occurrence -> the series and the number that its message names."""


class Recurred(Story):
    """A series whose occurrences are not what its definition or its messages say.

    2 and 3 name another series, 2 and 6 other numbers. 3 is planned for no time of the series, 4 is
    due a second too late, 5 is not delivered, and 7 is cancelled by the deletion of the series: no
    filter cancelled it. Series "b" was created by no client, and waits for its occurrence without
    end.
    """

    def write(self) -> None:
        run, log = self.run, self.log
        topic = log.topic("recurred")
        group = log.group(topic, "g")
        spec = SeriesSpec(
            every_ms=1000,
            start_ms=self.ms(1000),
            misfire=Misfire.FIRE_ALL,
            payload=payload_of(MARK),
        )
        for key in (b"a", b"b"):
            log.series(CreateSeries(topic, key, spec, UnixMs(self.ms(0))))
        for number, due_ms in DUE_MS.items():
            planned_ms = self.ms(PLANNED_MS[number])
            at_ms = self.ms(DUE_MS.get(number - 1, 10))
            log.occurrence(1, number, planned_ms, self.ms(due_ms), at_ms=at_ms)
            if number < 7:
                log.fire(self.ms(due_ms))
        log.series(DeleteSeries(1), at_ms=self.ms(6500))
        log.reserve(topic, group, 9)
        log.ack(topic, group, [0, 1, 2, 3, 4, 5], at_ms=self.ms(9000))
        self._tell(ToldHistory(run, "recurred"))

    def _tell(self, h: ToldHistory) -> None:
        span: dict[str, Any] = {"span_ms": self.span_ms(0, 20), "outcome": OK}
        span |= {"topic": "recurred", "key": "a"}
        h.change("create_series", **span, said='{"every_ms": 1000, "misfire": "fire_all"}')
        h.change("alter_series", **span, said='{"paused": true}')  # the log has no such change
        h.change("delete_series", **span)
        h.change("cancel", **span | {"key": None}, changed=0, due_to_ms=self.ms(1))
        h.open("recurred", "g", start_ms=self.start_ms)
        for number, (series, told) in TOLD.items():
            fired_ms = self.ms(DUE_MS[number])
            h.deliver(
                "recurred", "g", received_ms=fired_ms + 1, handed_out_ms=fired_ms, epoch=1,
                lease_id=number, offsets=[number - 1], attempts=[1], marks=[MARK],
                ids=[id_of(fired_ms, self.mark(number))], fired_at_ms=[fired_ms],
                due_ms=[fired_ms], series=[series], occurrences=[told],
            )  # fmt: skip
            h.ack("recurred", "g", [number - 1], results=["ACKED"], epoch=1, lease_id=number,
                  span_ms=(fired_ms + 1, fired_ms + 2), outcome=OK)  # fmt: skip
        h.close()
