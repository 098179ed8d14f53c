"""Figures of single topics for the metrics: of some topics, and of all others together.

    busiest    activity = timers scheduled + fired + cancelled + dropped; an hour ago counts half
    holding    topics that hold timers in a pause: those that have held some for the longest time

There may be 100,000 topics, and a label for each would cost more than it is worth. A measurement
looks only at the topics that changed since the last one. A topic keeps its place until another one
is twice as busy, so that few series end.

The counters of the other topics together start at zero, and rise by the cluster's totals minus
those of the shown topics. So rates add up to the cluster's rate, over restarts too: a scraper takes
a fall for a new start at zero. The values themselves do not add up: a topic that becomes one of the
shown ones enters with its counts since its creation.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from timer.model.units import MonoMs, TopicId
from timer.ready.topic import Topic
from timer.state.machine import Machine

HALF_LIFE_MS: Final = 3_600_000
TOPICS_AT_ONCE: Final = 512
"""Topics that are looked at without a pause: one or two milliseconds."""
OTHERS: Final = "(other)"
"""Label of the other topics; no topic can have this name."""
COUNTERS: Final = ("scheduled", "fired", "cancelled", "dropped", "expired")
GAUGES: Final = ("pending", "held", "ready")
_WEIGHT_MAX: Final = 1e200


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """The figures of one topic, or of the others together."""

    name: str
    counters: tuple[int, ...]
    """In the order of COUNTERS."""
    gauges: tuple[int, ...]
    """In the order of GAUGES."""


class BusiestTopics:
    """Chooses the topics, and returns their figures."""

    def __init__(
        self,
        machine: Machine,
        topics_max: int,
        mono_ms: Callable[[], MonoMs],
        totals: Callable[[], TopicFigures],
    ) -> None:
        """`topics_max`: topics of each kind that are shown, at most; 0: none is ever looked at.

        `totals`: returns the sums over all topics.
        """
        self._machine, self._topics_max = machine, topics_max
        self._mono_ms, self._totals = mono_ms, totals
        self._changed: set[TopicId] | None = None
        """None: there was no measurement. On a node that is never scraped, deleted topics too
        would stay in the set."""
        self._began_ms = mono_ms()
        self._activity: dict[TopicId, tuple[float, int]] = {}
        """(score, activity at the last look). Recent activity has a greater weight, so that old
        scores need no decay."""
        self._holding: dict[TopicId, None] = {}
        """Topics that hold timers, in the order in which they were first seen to."""
        self._own_counters: dict[TopicId, tuple[int, ...]] = {}
        """Shown topics -> their counters at the last `figures`."""
        self._before: tuple[int, ...] | None = None
        """Counters of all topics at the last `figures`. None: there was none."""
        self._others = [0] * len(COUNTERS)

    async def measure(self) -> None:
        """Choose the topics again. The work pauses, so that the loop serves others meanwhile."""
        if not self._topics_max:
            return
        if self._changed is None:
            self._changed = self._machine.changes.reader()
            self._changed.update(self._machine.topics)
        weight, changed = self._weight(), self._changed
        while changed:
            portion = [changed.pop() for _ in range(min(len(changed), TOPICS_AT_ONCE))]
            for each in portion:
                self._update_score(each, weight)
            self._choose(portion)
            if changed:
                await asyncio.sleep(0)
        changed.clear()  # `pop` kept its table (timer/state/dirty_topics.py)

    def _weight(self) -> float:
        """Return the weight of the present; before it overflows, all scores become smaller."""
        weight: float = 2 ** ((self._mono_ms() - self._began_ms) / HALF_LIFE_MS)
        if weight > _WEIGHT_MAX:
            self._began_ms = self._mono_ms()
            self._activity = {i: (score / weight, n) for i, (score, n) in self._activity.items()}
            weight = 1.0
        return weight

    def _update_score(self, topic_id: TopicId, weight: float) -> None:
        topic = self._machine.topics.get(topic_id)
        if topic is None or not topic.held:
            self._holding.pop(topic_id, None)
        else:
            self._holding.setdefault(topic_id)
        if topic is None:
            self._activity.pop(topic_id, None)
            return
        counts = topic.counts
        activity = counts.scheduled + counts.fired + counts.cancelled + counts.dropped
        score, before = self._activity.get(topic_id, (0.0, 0))
        self._activity[topic_id] = score + (activity - before) * weight, activity

    def _choose(self, looked_at: Iterable[TopicId]) -> None:
        """Choose among the shown topics, some others, and all that hold timers.

        The score of no other topic has risen.
        """
        scores, shown, topics = self._activity, self._own_counters, self._machine.topics

        def score_of(topic_id: TopicId) -> float:
            score = scores[topic_id][0]
            return 2 * score if topic_id in shown else score

        candidates = (each for each in {*shown, *looked_at} if each in scores and each in topics)
        busiest = heapq.nlargest(self._topics_max, candidates, key=score_of)
        holding = (each for each in self._holding if each in topics)
        chosen = {*busiest, *islice(holding, self._topics_max)}
        self._own_counters = {each: shown.get(each) or _counters(topics[each]) for each in chosen}

    def figures(self) -> Sequence[TopicFigures]:
        """Return the figures of the chosen topics, and of the others together."""
        if not self._topics_max:
            return ()
        totals, topics = self._totals(), self._machine.topics
        shown = [topics[each] for each in self._own_counters if each in topics]
        rows = [TopicFigures(each.name, _counters(each), _gauges(each)) for each in shown]
        risen = [0] * len(COUNTERS)
        for topic, row in zip(shown, rows, strict=True):
            before = self._own_counters[topic.topic_id]
            risen = [sum_ + n - b for sum_, n, b in zip(risen, row.counters, before, strict=True)]
        all_before = self._before or totals.counters
        self._others = [
            others + max(0, total - before - of_shown)
            for others, total, before, of_shown in zip(
                self._others, totals.counters, all_before, risen, strict=True
            )
        ]
        self._before = totals.counters
        self._own_counters = {t.topic_id: row.counters for t, row in zip(shown, rows, strict=True)}
        rest = (
            max(0, total - sum(column))
            for total, *column in zip(totals.gauges, *(row.gauges for row in rows), strict=True)
        )
        return [*rows, TopicFigures(OTHERS, tuple(self._others), tuple(rest))]


def _counters(topic: Topic) -> tuple[int, ...]:
    counts = topic.counts
    return counts.scheduled, counts.fired, counts.cancelled, counts.dropped, topic.expired


def _gauges(topic: Topic) -> tuple[int, ...]:
    return topic.counts.pending, topic.held, topic.ready
