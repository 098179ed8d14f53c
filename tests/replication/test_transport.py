"""The greeting between nodes: the identity that each accepts of the other."""

import pytest

from replication.proto import replication_pb2 as pb
from replication.shell.transport import VERSION, Transport
from timer.model.units import ReplicaId

ME, OTHER, NEW = map(ReplicaId, (1, 2, 99))


@pytest.fixture
def transport() -> Transport:
    """Of node n1, replica 1, among n2 and n3; nothing is dialled."""

    def unused(*_: object) -> None:
        raise AssertionError

    return Transport(
        cluster_id="c",
        me=ME,
        name="n1",
        dials=dict.fromkeys(("n2", "n3"), unused),  # type: ignore[arg-type]
        on_message=unused,
        on_connected=lambda replica: None,
        on_failure=unused,
    )


def hello(**fields: object) -> bytes:
    """Return a greeting of n2 to n1; `fields` say otherwise."""
    usual = {
        "version": VERSION,
        "cluster_id": "c",
        "sender": OTHER,
        "name": "n2",
        "receiver_name": "n1",
    }
    return pb.Hello(**usual | fields).SerializeToString()  # type: ignore[arg-type]


def test_peer_is_known_by_its_name_whatever_its_replica_id(transport: Transport) -> None:
    assert transport.met(hello()) == ("n2", OTHER)
    transport.connected("n2", OTHER)
    assert transport.met(hello(sender=NEW)) == ("n2", NEW), "replaced under its name"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 9}, "version = 9"),
        ({"cluster_id": "d"}, "cluster_id = 'd' of 'n2': must be 'c'"),
        ({"receiver_name": "n7"}, "receiver_name = 'n7'"),
        ({"name": "n7"}, "name = 'n7': not among the peers of 'n1'"),
        ({"name": "n1"}, "name = 'n1': not among the peers of 'n1'"),
        ({"sender": ME}, "is that of 'n1': a copy?"),
    ],
)
def test_stranger_is_refused_with_the_field(
    transport: Transport, fields: dict[str, object], why: str
) -> None:
    assert why in str(transport.met(hello(**fields)))


def test_copy_of_a_data_directory_under_another_name_is_refused(transport: Transport) -> None:
    transport.connected("n2", OTHER)
    assert "is that of 'n2': a copy?" in str(transport.met(hello(name="n3")))
    transport.connected("n2", NEW)
    assert transport.met(hello(name="n3")) == ("n3", OTHER), "n2 is another replica by now"


def test_noise_is_no_greeting(transport: Transport) -> None:
    assert transport.met(b"\xff\xff") == "damaged Hello"
