"""A run in which one thing after the other is wrong, in logs that all agree: each has its name."""

from collections import Counter

import pytest

from tests.chaos import test_audit_groups as letters
from tests.chaos import test_audit_rules as rules
from tests.chaos import test_audit_series as series
from tests.chaos.told_lies import Audited

pytestmark = pytest.mark.spark


VIOLATIONS = {
    "delivered_late": 1,
    "late": 1,  # and not the timer of the topic that was paused
    "diverged": 2,  # asked for in another topic, given in another topic
    "misdated": 1,
    "cancel_untrue": 3,
    "undercounted": 1,
    "payload_untrue": 1,
    "policy_untrue": 1,
    "nack_untrue": 1,
    "moved_early": 1,
    "group_untrue": 1,
    "lease_cut": 1,
    "over_in_flight": 1,
    "ack_unfounded": 1,
    "epoch_untrue": 1,
    "diverged_entries": 1,
    "falling_entries": 4,  # the last frame of each log, and the deposed leader's
    "frozen_digests": 1,
    "short_log": 1,
}


def test_every_lie_of_logs_that_agree_has_its_name_and_nothing_else_is_accused(
    audited: Audited,
) -> None:
    told: tuple[dict[str, int], ...] = (
        VIOLATIONS,
        rules.VIOLATIONS,
        letters.LETTERS_VIOLATIONS,
        letters.LIVES_VIOLATIONS,
    )
    told += (series.VIOLATIONS,)
    wanted = sum(map(Counter, told), Counter[str]())
    assert audited.summary["violations"] == wanted
    producers = "home-producer, lived-producer, sought-producer"
    consumers = "home-g, home-h, lived-consumer, sought-ahead, sought-anew, …"
    assert audited.summary["not_looked_at"] == [
        "counts of n1, n2, n3: states.jsonl has none of the last fifth of the log",
        "digests of n2, n3: states.jsonl has none of the last fifth of the log",
        "files of n1, n2, n3: no manifest is in the folder",
        f"payloads beyond their marks: lines of {producers} have no payload_crcs",
        f"times of deliveries: lines of {consumers} have no handed_out_ms",
    ]
