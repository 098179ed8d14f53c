"""An upgrade from the previous release: what each program accepts of the other, and a whole one."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest

from cluster.control import control_state, raft_link
from cluster.control.control_state import Appoint, ControlState, Init
from cluster.control.raft_link import FrameKind
from cluster.settings.release import RELEASE
from replication.shell.tcp_stream import TcpEnds
from replication.shell.transport import Transport
from tests.cluster.load import PAUSE_S_MAX, loaded
from tests.cluster.previous_release import VERSION, PreviousRelease, TwoReleases
from tests.cluster.running import until
from tests.timer.stores import format_a
from timer.files.data_directory import DataDirectory
from timer.files.disk import RealDisk
from timer.model.feature_level import LEVEL_MAX
from timer.model.units import Epoch, ReplicaId
from timerclient import TimerClient
from timerclient.cli.cli_rolling import RestartSequence, order_of

RISE_S = 180.0
"""Longest wait for the rise, which comes a minute after the last restart."""

# Runs with the code of the previous release. It must accept each message of this tree.
PEER = """
import json, sys
from pathlib import Path
from cluster.control import control_state, raft_link
from replication.shell.transport import Transport
import timerclient

def unused(*_):
    raise AssertionError

new = {name: bytes.fromhex(data) for name, data in json.loads(sys.argv[1]).items()}
transport = Transport(cluster_id="c", me=1, name="n1", dials={"n2": unused},
    on_message=unused, on_connected=unused, on_failure=unused)
state, _ = control_state.apply(control_state.load(new["state"]), new["appoint"])
print(json.dumps({
    "version": timerclient.__version__,
    "met": transport.met(new["hello"]),
    "sender": raft_link._check_hello(new["greeting"], "n2", "n1", "c"),
    "frames": raft_link._frames(new["frames"]),
    "epoch": state.epoch,
    "hello": transport.hello("n2").hex(),
    "greeting": raft_link._hello("n1", "n2", "c").hex(),
    "state": control_state.dump(state).hex(),
}))
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> PreviousRelease:
    """Return the code of the previous release."""
    return PreviousRelease(tmp_path_factory.mktemp("previous"))


def node_transport() -> Transport:
    """Return the transport of n2, whose peer is n1."""

    def unused(*_: object) -> Any:
        raise AssertionError

    return Transport(
        cluster_id="c", me=ReplicaId(2), name="n2", dials={"n1": unused}, on_message=unused,
        on_connected=unused, on_failure=unused, tcp=TcpEnds(None, unused), release=RELEASE,
        level=lambda: 1,
    )  # fmt: skip


def commands() -> tuple[ControlState, bytes]:
    """Return the state of a cluster at level 2, and an appointment that raises it."""
    state = ControlState()
    appoint = Appoint(epoch=Epoch(1), leader=ReplicaId(1), expected_epoch=Epoch(0), level=2)
    for command in (Init(cluster_id="c", voters={"n1": ReplicaId(1)}), appoint):
        state, _ = control_state.apply(state, control_state.encode_command(command, nonce=1))
    later = Appoint(epoch=Epoch(2), leader=ReplicaId(1), expected_epoch=Epoch(1), level=2)
    return state, control_state.encode_command(later, nonce=2)


def test_each_release_accepts_the_hellos_and_the_control_state_of_the_other(
    previous: PreviousRelease,
) -> None:
    transport = node_transport()
    state, appoint = commands()
    release = msgpack.packb([RELEASE.program, RELEASE.level_min, RELEASE.level_max])
    said = {
        "hello": transport.hello("n1"),
        "greeting": raft_link._hello("n2", "n1", "c"),
        "frames": msgpack.packb([[FrameKind.RELEASE, release]]),
        "state": control_state.dump(state),
        "appoint": appoint,
    }
    done = previous.run("-c", PEER, json.dumps({name: data.hex() for name, data in said.items()}))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["version"], answer["met"]) == (VERSION, ["n2", 2])
    assert (answer["sender"], answer["frames"], answer["epoch"]) == ("n2", [], 2)
    assert transport.check_hello(bytes.fromhex(answer["hello"])) == ("n1", ReplicaId(1))
    greeting = bytes.fromhex(answer["greeting"])
    assert raft_link._check_hello(greeting, "n1", "n2", "c") == "n1"
    assert control_state.load(bytes.fromhex(answer["state"])).epoch == 2


def test_previous_release_refuses_a_directory_of_the_next_level_and_changes_nothing(
    previous: PreviousRelease, tmp_path: Path
) -> None:
    path = tmp_path / "n1"
    identity = format_a(RealDisk(), path)
    directory = DataDirectory(RealDisk(), path, identity, RealDisk().lock(path / "LOCK"))
    directory.raise_level(LEVEL_MAX)
    directory.close()
    before = files_of(path)
    done = previous.run("-m", "cluster.node.timerd", *words_of(identity.cluster_id, path))
    assert done.returncode == 66, done.stderr
    assert "identity.json: format version 2; this program knows 1" in done.stderr
    assert files_of(path) == before


def words_of(cluster_id: str, data: Path) -> list[str]:
    settings = {"cluster_id": cluster_id, "peers": "a=127.0.0.1:1,b=127.0.0.1:2,c=127.0.0.1:3"}
    words = [word for each in settings.items() for word in ("--set", "=".join(each))]
    return [*words, "--name", "a", "--data", str(data)]


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the files except LOCK, which has the pid of the last process."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != "LOCK")
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


@pytest.mark.long
def test_cluster_is_upgraded_under_load_and_the_level_rises_at_the_end(
    previous: PreviousRelease, tmp_path: Path, topic: str, figures: Callable[[str], None]
) -> None:
    cluster = TwoReleases(tmp_path / "cluster", previous)
    told: list[str] = []
    with cluster.cleaned(), loaded(cluster, topic) as load, cluster.client() as client:
        first = order_of(client.status())[0]
        assert versions(client) == dict.fromkeys(cluster.nodes, VERSION)
        cluster.upgraded.add(first)
        cluster.replace(first)
        load.wait_for_acks(200)
        assert versions(client)[first] == RELEASE.program
        cluster.change_leader(client, first)  # it leads followers of the previous release
        load.wait_for_acks(200)
        assert max(levels(client)) == 1
        cluster.upgraded.discard(first)
        cluster.replace(first)  # back to the previous release
        load.wait_for_acks(200)
        assert versions(client) == dict.fromkeys(cluster.nodes, VERSION)
        restart, order = partial(upgraded, cluster), order_of(client.status())
        RestartSequence(client, restart, told.append, 120).run(order)
        assert versions(client) == dict.fromkeys(cluster.nodes, RELEASE.program)
        status = client.status()
        assert status.feature_level <= 1, "all nodes may still go back"
        until(lambda: levels(client) == {LEVEL_MAX}, RISE_S)
        load.wait_for_acks(200)
    gap_s = load.longest_gap_s()
    figures(f"longest pause of schedule calls {gap_s * 1_000:.0f} ms in {told}")
    assert gap_s < PAUSE_S_MAX
    assert f"{order[-1]}: leadership transferred" in "\n".join(told)


def upgraded(cluster: TwoReleases, name: str) -> None:
    cluster.upgraded.add(name)
    cluster.replace(name)


def versions(client: TimerClient) -> dict[str, str]:
    return {node.name: node.version for node in client.status().nodes}


def levels(client: TimerClient) -> set[int]:
    return {node.feature_level for node in client.status().nodes}
