"""One audited run of all that is planted in whole runs; each test looks at its own part."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chaos.oracle.story import LIFE
from tests.chaos.world import Story


@dataclass(frozen=True)
class Audited:
    """What the audit says of a run, and the stories of which the run was made."""

    summary: dict[str, Any]
    stories: Mapping[str, Story]

    def named(self, story: Story) -> set[tuple[str, int, str | None]]:
        """Return the timers of a story that are accused: verdict, number, topic."""
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
        """Return what was found to break one rule of topics and groups."""
        return [row for row in self.summary["rule_offenders"] if row["verdict"] == verdict]
