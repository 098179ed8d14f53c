"""The simulator: same seed, same run; the promises hold; its faults bite."""

import pytest

from chaos.sim import __main__ as command
from chaos.sim.options import FAULTS_MIN
from chaos.sim.play import EXIT_PROMISE
from chaos.sim.referee import Broken
from chaos.sim.world import World
from timer.units import Epoch


@pytest.mark.parametrize("seed", range(8))
def test_promises_hold(seed: int) -> None:
    world = World(seed)
    world.run(60)
    assert len(world.faults.injected) >= FAULTS_MIN
    assert len(world.referee.committed) > 10
    assert world.referee.epochs >= 1


def test_same_seed_gives_the_same_run() -> None:
    one, other = World(5), World(5)
    one.run(20)
    other.run(20)
    assert one.referee.committed == other.referee.committed
    assert one.timeline.events == other.timeline.events
    assert one.story() == other.story()


def test_lost_entry_is_reported_with_seed_and_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(world: World, seconds: int) -> None:
        world.timeline.note("node 1", "does something")
        world.referee.committed.append((Epoch(1), b"other"))
        raise Broken("lost", f"after {seconds} s")

    monkeypatch.setattr(World, "run", run)
    assert command.main(["--seed", "77", "--seconds", "9"]) == EXIT_PROMISE
    said = capsys.readouterr().out
    assert "does something" in said
    assert "PROMISE BROKEN: lost: after 9 s" in said
    assert "python -m chaos.sim --seed 77 --app timers --seconds 9" in said
