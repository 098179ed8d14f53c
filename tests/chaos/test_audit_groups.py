"""The audit of redrives, seeks, and groups that are deleted: planted lies."""

import pytest

from tests.chaos.told_lies import Audited

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


# ---- dead letters, redriven


LETTERS_VIOLATIONS = {
    "lost": 2, "phantom": 1, "redrive_untrue": 1, "carried_untrue": 2,
    "moved_early": 6,  # of a group without a limit
}  # fmt: skip


def test_letters_that_are_redriven_are_messages_of_their_own_and_lies_about_them_are_found(
    audited: Audited,
) -> None:
    story = audited.stories["redriven"]
    assert audited.named(story) == {("lost", 3, "home"), ("lost", 6, "home.g.dead"),
                                    ("phantom", 4, None)}  # fmt: skip
    found = audited.summary
    assert {"op": "redrive", "by": "name", "on_conflict": "", "result": "changed", "n": 6} in found[
        "operations"
    ]
    carried, elsewhere = audited.rules("carried_untrue")  # these by seq
    assert (story.number(carried["mark"]), story.number(carried["was_mark"])) == (2, 5)
    assert carried["topic"] == "home"
    assert story.number(elsewhere["mark"]) == 7
    assert (elsewhere["topic"], elsewhere["was_from"]) == ("elsewhere", "home")
    [redrive] = audited.rules("redrive_untrue")
    assert (redrive["told"], redrive["logged"]) == (6, 5)


# ---- groups that are sought, or deleted


LIVES_VIOLATIONS = {
    "lost": 3, "acked_again": 1, "unmarked_redelivery": 1, "ack_lost": 1, "seek_untrue": 2,
    "group_delete_lost": 1,
}  # fmt: skip


def test_each_life_of_a_group_owes_what_lies_from_its_start_on_and_lies_about_it_are_found(
    audited: Audited,
) -> None:
    assert audited.named(audited.stories["sought"]) == {
        (verdict, number, "sought") for verdict, number in (
            ("lost", 4), ("lost", 8), ("lost", 1), ("acked_again", 5), ("unmarked_redelivery", 2),
            ("ack_lost", 6),
        )
    }  # fmt: skip
    counts = {row["op"]: row["n"] for row in audited.summary["operations"]}
    assert (counts["seek"], counts["delete_group"]) == (2, 3)
    untrue = [(row["group"], row["to_offset"], row["start_offset"])
              for row in audited.rules("seek_untrue")]  # fmt: skip
    assert sorted(untrue) == [("ahead", 5, 6), ("back", 2, None)]
    [deleted] = audited.rules("group_delete_lost")
    assert (deleted["topic"], deleted["group"]) == ("sought", "gone")
