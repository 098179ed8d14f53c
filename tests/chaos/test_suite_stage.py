"""The stage: taken down from any state, and it knows who is whole, sure, and ended well."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from chaos.history.history import RunFolder
from chaos.suite.nemeses import file_damage
from chaos.suite.stage import stage as stages
from chaos.suite.stage.plan import Need, RunOptions
from chaos.suite.stage.stage import Stage
from chaos.suite.suite_run import RunPlan, SuiteRun
from deploy.local import LaunchError, LocalCluster
from tests.chaos.blows import Blow
from tests.chaos.world import durable_log
from tests.timer.machines import Log as MachineLog
from tests.timer.machines import catch_up, engine_on, flush
from timer.files.disk import RealDisk


def test_stage_takes_itself_down_when_it_can_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: LocalCluster, **_: object) -> None:
        raise LaunchError("no node today")

    monkeypatch.setattr(LocalCluster, "start", start)
    stage = Stage(RunFolder(tmp_path), missing=dict.fromkeys(Need, ""))
    with pytest.raises(LaunchError, match="no node today"):
        stage.__enter__()
    with pytest.raises(ValueError, match="closed file"):
        stage.record("late")


def test_error_that_no_strike_explains_is_a_failure_though_the_node_healed(tmp_path: Path) -> None:
    stage = Stage(RunFolder(tmp_path), missing=dict.fromkeys(Need, ""))
    log = tmp_path / "logs" / "n1.log"
    log.parent.mkdir()
    full = 'level=error node=n1 logger=cluster.process msg="the disk is full; restarting: ENOSPC"'
    corrupt = 'level=error node=n1 logger=cluster.scrub msg="x: corrupt at byte 7: checksum"'
    diverged = 'level=error node=n1 logger=cluster.process msg="damaged data: x" exc="Diverged"'
    bug = 'level=error node=n1 logger=cluster.node msg="Task exception was never retrieved"'
    fine = 'level=info node=n1 logger=x msg="a level=error in words"'
    lines = [f"time=0 {each}" for each in (full, corrupt, diverged, bug, fine)]
    log.write_text("\n".join(lines))
    assert stage.unexplained_errors("n1") == lines[1:4]
    stage.hurt.add("n1")
    assert stage.unexplained_errors("n1") == lines[2:4], "damage is no excuse for anything else"
    assert stage.unexplained_errors("n2") == []
    stage.faults.close()


@pytest.mark.parametrize("found", ["at its start", "by its scrub"])
@pytest.mark.parametrize("given_up", [False, True])
def test_damaged_node_that_does_not_come_back_may_only_have_given_up(
    tmp_path: Path, given_up: bool, found: str
) -> None:
    durable_log(tmp_path)
    lost = list[str]()

    def waited(name: str) -> None:
        raise LaunchError(f"{name} is not ready")

    at_start = found == "at its start"
    stage: Any = SimpleNamespace(
        lend_turn=contextlib.nullcontext,
        kill=lambda _: None, archive=SimpleNamespace(seal=lambda _: None), data=lambda _: tmp_path,
        damaged=set(), hurt=set(), restart=waited if at_start else lambda _: None,
        wait_until_whole=waited, lose=lost.append, leader=lambda: "n1",
        is_given_up=lambda _: given_up, say=lambda _: None,
    )  # fmt: skip
    with contextlib.nullcontext() if given_up else pytest.raises(LaunchError, match="not ready"):
        Blow(file_damage.damage, "leader", how=file_damage.REMOVED).strike(stage, random.Random(1))
    assert (lost, stage.hurt) == (["n1"] if given_up else [], {"n1"})


class Told:
    """A client, of a cluster whose n1 is a follower that has all, and says that of its files."""

    def __init__(self, *damage: str) -> None:
        self.damage = [*damage]
        self.names = ["", "n1"]
        """The last one from the second time on: who has just started does not know it."""

    def __call__(self, _: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def members(self) -> Any:
        name = self.names.pop(0) if len(self.names) > 1 else self.names[0]
        one = SimpleNamespace(name=name, role="follower", unsure=False, lag_entries=0)
        return SimpleNamespace(members=[one])

    def status(self) -> Any:
        damage = self.damage.pop(0) if len(self.damage) > 1 else self.damage[0]
        return SimpleNamespace(nodes=[SimpleNamespace(name="n1", damage=damage)])


def test_node_is_whole_once_its_files_are_sound_and_its_own_scrub_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(RunFolder(tmp_path), missing=dict.fromkeys(Need, ""))
    monkeypatch.setattr(stages, "WHOLE_POLL_S", 0.0)
    monkeypatch.setattr(stage.cluster, "is_running", lambda _: True)
    monkeypatch.setattr(stages, "TimerClient", told := Told("a run", ""))
    monkeypatch.setattr(LocalCluster, "endpoints", ["n1:1"])
    data = stage.data("n1")
    damages = ["", "a segment", "", ""]
    monkeypatch.setattr(stage, "damage_of", lambda _: damages.pop(0))
    damages.pop(0)
    stage.wait_until_whole("n1")
    assert (told.damage, damages) == ([""], [""]), "both were asked until nothing was found"
    monkeypatch.undo()
    engine = engine_on(RealDisk(), data / "state")
    durable_log(data)
    assert stage.damage_of("n1") == ""
    log = MachineLog()
    log.begin_epoch()
    catch_up(engine, log)
    flush(engine)
    assert stage.damage_of("n1") == ""
    path = data / "state" / "manifest"
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in stage.damage_of("n1")
    stage.faults.close()


def test_node_that_has_ended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(RunFolder(tmp_path), missing=dict.fromkeys(Need, ""))
    monkeypatch.setattr(stage.cluster, "is_running", lambda _: False)
    monkeypatch.setattr(stages, "TimerClient", Told(""))
    monkeypatch.setattr(LocalCluster, "endpoints", ["n1:1"])
    with pytest.raises(LaunchError, match="n1 is not whole"):
        stage.wait_until_whole("n1")
    stage.faults.close()


def test_nothing_is_struck_while_a_voter_is_unsure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [(True, "follower"), (False, "unreachable"), (True, "follower"), (False, "follower")]

    def members() -> Any:
        unsure, role = answers.pop(0)
        there = [("n1", True, False, "leader"), ("n2", True, unsure, role)]
        there += [("n3", False, True, "learner")]
        rows = [SimpleNamespace(name=n, voter=v, unsure=u, role=r) for n, v, u, r in there]
        return SimpleNamespace(members=rows)

    client = SimpleNamespace(members=members)
    stage = Stage(RunFolder(tmp_path), missing=dict.fromkeys(Need, ""))
    monkeypatch.setattr(stages, "WHOLE_POLL_S", 0.0)
    monkeypatch.setattr(stages, "TimerClient", lambda _: contextlib.nullcontext(client))
    monkeypatch.setattr(LocalCluster, "endpoints", ["n1:1"])
    monkeypatch.setattr(stage.cluster, "is_running", lambda _: True)
    monkeypatch.setattr(stage, "note_deaths", list)
    nothing = RunPlan(scenario="none", seed=0, options=RunOptions(), schedule=[])
    SuiteRun(RunFolder(tmp_path), nothing)._restore_nodes(stage)
    assert answers == []
    monkeypatch.setattr(stages, "READY_S", 0.01)
    for answer in ((True, "follower"), (False, "unreachable")):
        answers[:] = [answer] * 10_000
        with pytest.raises(LaunchError, match=r"unsure or silent: n2$"):
            stage.wait_until_sure()
    stage.lost.add("n2")
    monkeypatch.setattr(stages, "READY_S", 90.0)
    stage.wait_until_sure()
    stage.faults.close()


@pytest.mark.parametrize("heals", [True, False])
def test_node_that_fails_to_heal_is_its_nemesis_own_until_its_turn_is_back(
    tmp_path: Path, heals: bool
) -> None:
    stage = Stage(RunFolder(tmp_path), missing=dict.fromkeys(Need, ""))
    seen = []

    @contextlib.contextmanager
    def lent() -> Iterator[None]:
        seen.append({*stage.waited_for})
        try:
            yield
        finally:
            seen.append({*stage.waited_for})

    stage.turn.lent = lent  # type: ignore[method-assign]
    with contextlib.suppress(LaunchError), stage.lend_turn("n1"):
        if not heals:
            raise LaunchError("it has ended")
    assert seen == [{"n1"}, set() if heals else {"n1"}]
    assert stage.waited_for == set()
    stage.faults.close()


def test_nodes_that_end_badly_when_asked_are_failures(tmp_path: Path) -> None:
    stage = Stage(RunFolder(tmp_path), missing=dict.fromkeys(Need, ""))
    status: dict[str, int | None] = {"n1": 0, "n2": 1, "n3": None}
    stage.cluster.exit_status = lambda name: status[name]  # type: ignore[method-assign]
    stage.check_end(*status)
    assert stage.failures == ["n2 ended with status 1 after SIGTERM"]
    stage.damaged |= {"n1", "n2"}
    stage.cluster.is_running = lambda name: name == "n3"  # type: ignore[method-assign]
    status |= {"n1": 66}
    assert stage.note_deaths() == ["n2"], (
        "a damaged node may end for want of a healer, and in no other way"
    )
    assert stage.lost == {"n1"}
    stage.faults.close()
