"""One audited run of all stories; each test reads the part of its own story."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chaos.oracle.story import LIFE
from tests.chaos.world import Story


@dataclass(frozen=True)
class Audited:
    """The audit's summary of a run, and the stories that the run consists of."""

    summary: dict[str, Any]
    stories: Mapping[str, Story]

    def named(self, story: Story) -> set[tuple[str, int, str | None]]:
        """Return the offending timers of a story as (verdict, number, topic)."""
        return {
            (
                row["verdict"],
                story.number(row["mark"]),
                row["topic"] and row["topic"].split(LIFE)[0],
            )
            for row in self.summary["offenders"]
            if story.before < row["mark"] <= story.last
        }

    def rules(self, verdict: str) -> list[dict[str, Any]]:
        """Return the offenders against one rule of topics and groups."""
        return [row for row in self.summary["other_offenders"] if row["verdict"] == verdict]
