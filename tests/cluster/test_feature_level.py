"""The feature level rises when all nodes have announced it, and not before."""

import pytest

from cluster.control.control_state import Appoint
from cluster.control.controller_events import Announced, LinkChanged, TransferRequest
from tests.cluster.controlling import CONFIG, VOTERS, Play, follower, in_service, serving
from timer.model.feature_level import FIRST_RELEASE, ProgramRelease

NEWER = ProgramRelease("0.2.0", 1, 2)


def test_level_rises_when_all_nodes_have_announced_it() -> None:
    play = in_service(release=NEWER)
    play.do(Announced("b", NEWER))
    play.run(2 * CONFIG.raise_level_after_ms)
    assert play.appointed == [], "c has announced nothing"
    play.do(Announced("c", NEWER))
    play.run(CONFIG.raise_level_after_ms - 1_000)
    assert play.appointed == []
    play.run(2_000)
    assert (play.appointed, play.state.level) == ([(6, "b")], 2)
    assert "feature level 2" in play.reason
    play.reports["b"] = serving("b", epoch=6)
    play.run(2 * CONFIG.raise_level_after_ms)
    assert len(play.appointed) == 1, "it is risen"


def test_level_rises_with_any_appointment_that_all_nodes_see() -> None:
    play = in_service(release=NEWER)
    for name in ("b", "c"):
        play.do(Announced(name, NEWER))
    play.do(TransferRequest(VOTERS["c"]))
    assert (play.appointed, play.state.level) == ([(6, "c")], 2)


@pytest.mark.parametrize("older", ["voter away", "voter went back", "learner", "this node"])
def test_level_stays_while_a_node_may_be_of_an_older_release(older: str) -> None:
    play = in_service(release=FIRST_RELEASE if older == "this node" else NEWER)
    for name in ("b", "c"):
        play.do(Announced(name, NEWER))
    if older == "voter away":
        play.lose("c")
    elif older == "voter went back":
        play.do(Announced("c", FIRST_RELEASE))
    elif older == "learner":
        play.do(LinkChanged("d", up=True))
    play.run(2 * CONFIG.raise_level_after_ms)
    play.do(TransferRequest(VOTERS["a"]))
    assert play.state.level == 0
    assert [name for _, name in play.appointed] == ["a"]


@pytest.mark.parametrize("last_epoch", [0, 3])
def test_new_cluster_begins_at_the_level_of_the_nodes_that_are_there(last_epoch: int) -> None:
    play = Play({name: follower(name, epoch=last_epoch) for name in ("a", "b")}, release=NEWER)
    play.lead()
    play.do(Announced("b", NEWER))
    play.run(2_000)
    first = play.proposed[0]
    assert isinstance(first, Appoint)
    assert first.level == (0 if last_epoch else 2), "c may be of an older release"


def test_level_above_all_programs_of_the_cluster_is_never_chosen() -> None:
    play = in_service(release=ProgramRelease("0.3.0", 2, 3))
    for name in ("b", "c"):
        play.do(Announced(name, FIRST_RELEASE))
    play.run(2 * CONFIG.raise_level_after_ms)
    assert play.state.level == 0
