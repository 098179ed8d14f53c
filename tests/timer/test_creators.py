"""Creators of topics and groups are counted."""

from tests.timer.machines import Log, engine_on
from tests.timer.node_files import flushed
from timer.entries.payloads import Op
from timer.state.machine import Machine


def counted(machine: Machine) -> tuple[dict[str, int], dict[str, int]]:
    return dict(machine.creators.topics), dict(machine.creators.groups)


def test_creators_are_counted_until_the_deletion_also_after_a_restart() -> None:
    log = Log()
    log.begin_epoch(level=2)
    log.topic("a", "client/a")
    log.topic("b", "client/b")
    log.topic("b", "client/a")  # is there already
    log.topic("c")
    for name in ("g", "h"):
        log.create_group(1, name, creator="client/b")
    log.create_group(2, "g", creator="client/b")
    log.op(Op.SEEK, 1, 2, [0])
    disk, engine = flushed(log)
    whole = {"client/a": 1, "client/b": 1}, {"client/b": 3}
    assert counted(engine.machine) == whole
    again = engine_on(disk).machine
    assert counted(again) == whole
    assert again.digest() == engine.machine.digest() == again.recomputed_digest()
    again.apply(log.op(Op.DELETE, 1, 1, []))
    assert counted(again)[1] == {"client/b": 2}
    again.apply(log.delete_topic(1))
    assert counted(again) == ({"client/b": 1}, {"client/b": 1})
    assert again.digest() == again.recomputed_digest()
