"""Whom nemeses hit and whether that had an effect, without a cluster: nothing is lost silently."""

import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from chaos.history.history import RunFolder
from chaos.suite.nemeses import file_damage, processes
from chaos.suite.nemeses.file_damage import CUT, FLIPPED, REMOVED, damage, fill
from chaos.suite.nemeses.links import bridge, flap
from chaos.suite.nemeses.nemesis import NoEffect, choose
from chaos.suite.nemeses.processes import kill_many, power_cut, rolling_restart, transfers
from chaos.suite.stage.network import Network, NetworkError
from chaos.suite.stage.plan import Need
from chaos.suite.stage.stage import Stage
from chaos.suite.stage.turn import Turn
from cluster.files.standby_ports import WAITING
from tests.chaos.blows import Blow
from tests.chaos.turns import until_asked
from tests.chaos.world import durable_log
from timer.recovery import manifest
from timerclient.values.errors import CommitTimeout, NotReady, TimerError

SEEDS = range(20)


class FakeStage(SimpleNamespace):
    """n1 leads. Remembers who was killed, cut off, stopped and brought back."""

    def __init__(self, *lost: str, nodes: int = 3) -> None:
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.lost = {*lost}
        self.away = {*lost}
        self.calls: list[tuple[str, ...]] = []
        super().__init__(
            leader=lambda: "n1",
            turn=Turn(),
            waited_for=set(),
            lend_turn=contextlib.nullcontext,
            say=lambda _: None,
            record=lambda *_, **__: None,
            kill=self.calling("kill"),
            restart=self.restart,
            wait_until_sure=lambda: None,
            cut_power=self.calling("cut_power"),
            check_end=lambda _: None,
            cluster=SimpleNamespace(
                stop=self.calling("stop"),
                state=lambda _: None,
                endpoints=["n1:1"],
                start=self.calling("start"),
            ),
            network=SimpleNamespace(cut=self.cut),
        )

    def restart(self, *names: str) -> None:
        self.calls.append(("restart", *sorted(names)))
        self.away.difference_update(names)

    def calling(self, what: str) -> Callable[..., None]:
        return lambda *names, **_: self.calls.append((what, *sorted(names)))

    @contextlib.contextmanager
    def cut(self, pairs: Iterable[tuple[str, str]]) -> Iterator[None]:
        self.calls += [("cut", *pair) for pair in pairs]
        yield
        self.calls.append(("heal",))

    def hit(self) -> set[str]:
        """Return all names that it was called with."""
        return {name for _, *names in self.calls for name in names}


# ---- victims


@pytest.mark.parametrize(("who", "fit"), [("follower", {"n3"}), ("any", {"n1", "n3"})])
def test_lost_node_is_nobodys_victim(who: str, fit: set[str]) -> None:
    stage: Any = FakeStage("n2")
    assert {choose(stage, who, random.Random(seed)) for seed in SEEDS} == fit


def test_who_is_away_is_a_victim_only_if_nobody_else_is_there() -> None:
    stage: Any = FakeStage()
    stage.away = {"n2"}
    assert {choose(stage, "any", random.Random(seed)) for seed in SEEDS} == {"n1", "n3"}
    assert {choose(stage, "follower", random.Random(seed)) for seed in SEEDS} == {"n3"}
    stage.away = {"n2", "n3"}
    assert {choose(stage, "follower", random.Random(seed)) for seed in SEEDS} == {"n2", "n3"}


def test_strike_at_nobody_fizzles_and_says_why() -> None:
    stage: Any = FakeStage("n2", "n3")
    with pytest.raises(NoEffect, match="no follower is left: n2 and n3 lost for good"):
        choose(stage, "follower", random.Random(1))


def test_controller_that_is_lost_is_nobodys_victim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(RunFolder(tmp_path), missing=dict.fromkeys(Need, ""))
    said = {"n1": "n2", "n2": "n3", "n3": "n3"}  # n1 does not know better yet
    monkeypatch.setattr(stage.cluster, "is_running", lambda _: True)
    monkeypatch.setattr(stage.cluster, "state", lambda n: SimpleNamespace(controller=said[n]))
    assert stage.controller() == "n2"
    stage.lost = {"n2"}
    assert stage.controller() == "n3"
    stage.lost = {"n2", "n3"}
    assert stage.controller() is None
    monkeypatch.setattr(stage, "leader", lambda: "n1")  # and is not told to be what it may not be
    with pytest.raises(NoEffect, match="no running node knows the controller"):
        choose(stage, "controller", random.Random(1))
    stage.faults.close()


@pytest.mark.parametrize(
    "blow", [Blow(kill_many, 7), Blow(rolling_restart), Blow(power_cut, "all")]
)
def test_who_hits_all_leaves_the_lost_alone(blow: Blow) -> None:
    stage: Any = FakeStage("n2")
    blow.strike(stage, random.Random(1))()
    assert stage.hit() == {"n1", "n3"}


def test_rolling_restart_brings_back_whom_a_strike_between_left_down() -> None:
    stage: Any = FakeStage("n2", nodes=4)
    sure: list[set[str]] = []
    stage.wait_until_sure = lambda: sure.append(stage.away - stage.lost)

    def fails() -> None:
        with stage.turn:
            stage.away.add("n4")

    other = threading.Thread(target=fails)
    with stage.turn:
        other.start()
        until_asked(stage.turn, 2)
        Blow(rolling_restart).strike(stage, random.Random(1))()
    other.join()
    first, *_ = (names for what, *names in stage.calls if what == "stop")
    assert stage.calls[:3] == [("stop", *first), ("restart", *first), ("restart", "n4")]
    assert sure == [set()] * 3


def test_bridge_needs_two_halves() -> None:
    stage: Any = FakeStage("n2")
    with pytest.raises(NoEffect, match="only n1 and n3 are left"):
        Blow(bridge).strike(stage, random.Random(1))
    assert stage.calls == []
    stage = FakeStage("n2", nodes=5)
    for seed in SEEDS:
        Blow(bridge).strike(stage, random.Random(seed))()
    assert stage.hit() == {"n1", "n3", "n4", "n5"}


# ---- effects


@pytest.mark.parametrize(
    ("errors", "has_no_effect"),
    [
        ([NotReady("starting")] * 3, True),
        ([NotReady("starting"), None, NotReady("starting")], False),
        ([NotReady("starting"), CommitTimeout("nobody knows"), NotReady("starting")], False),
    ],
)
def test_transfers_of_which_all_were_refused_fizzle(
    monkeypatch: pytest.MonkeyPatch, errors: list[TimerError | None], has_no_effect: bool
) -> None:
    answers = iter(errors)

    class Client:
        def __init__(self, _: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def transfer(self, _: str) -> None:
            if error := next(answers):
                raise error

    monkeypatch.setattr(processes, "TimerClient", Client)
    stage: Any = FakeStage()
    storm = Blow(transfers, times=len(errors))
    if has_no_effect:
        with pytest.raises(NoEffect, match="all 3 transfers of the leadership were refused"):
            storm.strike(stage, random.Random(1))
    else:
        storm.strike(stage, random.Random(1))()


def damageable(tmp_path: Path) -> Any:
    """Return a stage whose nodes' data is `tmp_path`."""
    stage: Any = FakeStage()
    stage.archive = SimpleNamespace(seal=lambda _: None)
    stage.data = lambda _: tmp_path
    stage.damaged, stage.hurt = set(), set()
    stage.failures = []
    stage.wait_until_whole = lambda _: None
    return stage


@pytest.mark.parametrize("blow", [Blow(damage, how=how) for how in (CUT, FLIPPED, REMOVED)])
def test_log_with_nothing_to_lose_is_left_as_it_is(tmp_path: Path, blow: Blow) -> None:
    path = durable_log(tmp_path)
    whole = path.read_bytes()
    stage = damageable(tmp_path)
    blow.strike(stage, random.Random(1))()
    assert not path.exists() or path.read_bytes() != whole
    assert stage.hurt, "errors that it logs are explained"
    path.write_bytes(whole)
    stage = damageable(tmp_path)
    (tmp_path / "log" / "durable").unlink()
    with pytest.raises(NoEffect, match="has nothing durable yet"):
        blow.strike(stage, random.Random(1))
    assert path.read_bytes() == whole
    assert not stage.hurt
    assert [what for what, *_ in stage.calls] == ["kill"], "the run starts it"


def test_end_of_a_log_that_was_not_durable_is_no_loss(tmp_path: Path) -> None:
    path = durable_log(tmp_path, 1)
    path.write_bytes(durable_log(tmp_path / "longer", 9).read_bytes())
    stage = damageable(tmp_path)
    with pytest.raises(NoEffect, match="does not need the damaged part"):
        Blow(damage, how=CUT).strike(stage, random.Random(1))
    assert (stage.damaged, stage.hurt, stage.failures) == (set(), set(), [])


def with_state(data: Path, *names: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stage of nodes whose manifest needs files of these names; `verify` is blind."""
    for name in ("manifest", *names):
        (data / "state" / name).parent.mkdir(parents=True, exist_ok=True)
        (data / "state" / name).write_bytes(b"content")
    monkeypatch.setattr(file_damage, "verify", lambda *_, **__: [])
    monkeypatch.setattr(manifest, "read", lambda *_: {})
    monkeypatch.setattr(manifest, "files", lambda _: [(name, 7, None) for name in names])
    return damageable(data)


def test_state_that_is_not_there_yet_is_not_damaged(tmp_path: Path) -> None:
    stage = damageable(tmp_path)
    with pytest.raises(NoEffect, match="has no manifest yet"):
        Blow(damage, "follower", file_damage.STATE, REMOVED).strike(stage, random.Random(1))
    assert [what for what, *_ in stage.calls] == ["kill"], "the run starts it"


@pytest.mark.parametrize(
    ("how", "names", "excused"),
    [
        (REMOVED, [], True),  # a manifest, where the log is whole
        (FLIPPED, [], False),
        (FLIPPED, ["queues/1.spill"], True),  # a part that no block lies in
        (REMOVED, ["queues/1.spill"], False),
        (CUT, ["runs/1.arrow"], False),
        (REMOVED, ["runs/1.keys"], False),
    ],
)
def test_damage_that_a_node_would_not_find_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str,
    names: list[str], excused: bool,
) -> None:  # fmt: skip
    stage = with_state(tmp_path, *names, monkeypatch=monkeypatch)
    victim = tmp_path / "state" / (names or ["manifest"])[0]
    monkeypatch.setitem(file_damage.VICTIM, file_damage.STATE, lambda *_: victim)
    with pytest.raises(NoEffect, match="does not need the damaged part"):
        Blow(damage, "follower", file_damage.STATE, how).strike(stage, random.Random(1))
    assert bool(stage.failures) != excused
    assert (stage.damaged, stage.hurt) == (set(), set())


def test_every_kind_of_file_is_damaged_however_many_runs_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [f"runs/{number}.arrow" for number in range(99)]
    with_state(tmp_path, "queues/1.spill", *runs, monkeypatch=monkeypatch)
    hit = [file_damage._any_of_state(tmp_path, random.Random(seed)) for seed in SEEDS]
    assert {path.parent.name for path in hit} == {"state", "queues", "runs"}


@pytest.mark.parametrize("noticing", [set[str](), {"n3"}])
def test_full_disks_that_nobody_notices_fizzle_once_there_is_room_again(
    monkeypatch: pytest.MonkeyPatch, noticing: set[str]
) -> None:
    monkeypatch.setattr(file_damage, "NOTICE_S", 0.0)
    stage: Any = FakeStage("n2")

    def state(name: str) -> Any:
        return SimpleNamespace(role=WAITING, disk_low=True) if name in noticing else None

    def disk(name: str) -> Any:
        fill = stage.calling("fill")
        return SimpleNamespace(
            fill=lambda _: fill(name), drain=lambda: stage.calling("drain")(name)
        )

    stage.cluster.state = state
    stage.disks = {name: disk(name) for name in stage.names}
    undo = Blow(fill, "all").strike(stage, random.Random(1))
    if noticing:
        undo()
    else:
        with pytest.raises(NoEffect, match="n1 and n3 did not notice"):
            undo()
    filled_and_back = [("fill", "n1"), ("fill", "n3"), ("drain", "n1"), ("drain", "n3")]
    assert stage.calls == [*filled_and_back, ("start", "n1", "n3")]


# ---- what fails aside


def test_failure_of_flapping_links_is_raised_when_they_are_healed() -> None:
    stage: Any = FakeStage()
    cuts, failed = iter([True, False]), threading.Event()
    cut = stage.network.cut

    def once(pairs: Any) -> contextlib.AbstractContextManager[None]:
        if next(cuts):
            return cut(pairs)  # type: ignore[no-any-return]
        failed.set()
        raise NetworkError("ip: no such namespace")

    stage.network.cut = once
    said: list[str] = []
    stage.say = said.append
    undo = Blow(flap, "leader", period_s=0.01).strike(stage, random.Random(1))
    assert failed.wait(60)
    with pytest.raises(NetworkError, match="no such namespace"):
        undo()
    assert stage.calls[-1] == ("heal",)
    assert said == ["the links of n1, the leader flap"]


def test_cut_that_fails_midway_takes_back_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Network(["n1"])
    done: list[tuple[str, bool]] = []

    def carry_out(_: str, *lines: str, force: bool = False) -> None:
        done.extend((" ".join(line.split()[:2]), force) for line in lines)
        raise NetworkError("ip: the second one")

    monkeypatch.setattr(net, "_ip", carry_out)
    pairs = [("n1", "clients"), ("clients", "n1")]
    with pytest.raises(NetworkError, match="the second one"), net.cut(pairs):
        pass
    assert done == [("rule add", False)] * 2 + [("rule del", True)] * 2


@pytest.mark.parametrize("ends", [True, False])
def test_slow_link_that_ended_by_itself_is_told_when_it_is_undone(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    program = "print('up', flush=True)" + ("" if ends else "; input()")
    boxes: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, _: object, stdin: int, **more: Any) -> None:
            super().__init__([sys.executable, "-c", program], stdin=subprocess.PIPE, **more)
            boxes.append(self)

    rules: list[str] = []
    net = Network(["n1"])
    monkeypatch.setattr(net, "_ip", lambda _, *lines, **__: rules.extend(lines))
    monkeypatch.setattr("chaos.suite.stage.network.subprocess.Popen", Popen)
    said = pytest.raises(NetworkError, match="the slow link ended by itself, status 0")
    with said if ends else contextlib.nullcontext(), net.slow([("n1", "clients")], delay_ms=1):
        [box] = boxes
        if ends:
            box.wait()
    assert box.stdin is not None
    box.stdin.close()
    assert box.poll() is not None
    assert [rule.split()[1] for rule in rules] == ["add", "del"]
