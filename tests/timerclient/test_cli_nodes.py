"""timerctl: commands about nodes, and a cluster whose nodes differ."""

import json
from typing import Any

import pytest

from tests.timerclient.conftest import Answering, Ctl, Threaded
from tests.timerclient.fake_cluster import NOW_MS, wire_error
from timerclient.cli import timerctl
from timerclient.proto import timer_pb2 as pb


def test_members_names_the_command_that_gives_a_learner_a_vote(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ("n1", True, "leader"), ("n2", True, "unreachable"), ("n2", False, "learner")
    rows = [*known, ("n3", False, "learner"), ("n4", False, "follower")]
    members = [pb.Member(name=name, voter=voter, role=role) for name, voter, role in rows]
    answer, status = pb.ListMembersResponse(members=members, leader="n1"), pb.GetStatusResponse()
    monkeypatch.setattr(timerctl, "_client", lambda _: Answering(members=answer, status=status))
    notes = [line.partition("  -  ")[2].strip() for line in ctl("members")[1].splitlines()[-5:]]
    ends = ["-", "-", "members replace n2", "members add n3", "format it again, as a learner"]
    assert all(note.endswith(end) for note, end in zip(notes, ends, strict=True)), notes


def checkpoint(**digests: str) -> pb.GetCheckpointResponse:
    """Return the checkpoints of three nodes, with digests by node in place of the common one."""
    same: dict[str, Any] = {"epoch": 1, "commit_index": 11, "applied_index": 10, "age_ms": 1_500}
    same |= {"log_end": 12, "last_read_time_ms": NOW_MS, "queue_offsets": {"orders": 5}}
    return pb.GetCheckpointResponse(
        nodes=[
            pb.NodeCheckpoint(node=name, digest=digests.get(name, "ab"), reachable=True, **same)
            for name in ("n1", "n2", "n3")
        ],
        shared=pb.SharedCheckpoint(epoch=1, index=9, digest="ab"),
    )


def test_checkpoint_as_json_has_what_scripts_compare(ctl: Ctl, threaded: Threaded) -> None:
    threaded.cluster.on_call = lambda _: checkpoint()
    code, out, _ = ctl("-o", "json", "checkpoint")
    assert code == 0
    document = json.loads(out)
    node = document["nodes"][0]
    wanted = {
        *("node", "role", "epoch", "log_end", "commit_index", "applied_index"),
        *("last_read_time_ms", "queue_offsets", "digest", "age_ms"),
    }
    assert wanted <= node.keys()
    assert (node["node"], node["log_end"], node["queue_offsets"]) == ("n1", 12, {"orders": 5})
    assert document["shared"]["index"] == 9
    table = ctl("checkpoint")[1]
    assert "shared: epoch 1  index 9" in table
    assert "QUEUE OFFSETS" not in table
    assert "orders=5" in ctl("checkpoint", "-o", "wide")[1]


def test_compared_digests_that_differ_or_are_missing_exit_1(ctl: Ctl, threaded: Threaded) -> None:
    threaded.cluster.on_call = lambda _: checkpoint()
    assert ctl("checkpoint", "--compare")[0] == 0
    threaded.cluster.on_call = lambda _: checkpoint(n2="0123")
    code, out, _ = ctl("checkpoint", "--compare")
    assert (code, "checkpoint 9: the nodes DIFFER" in out) == (1, True)
    threaded.cluster.on_call = lambda _: checkpoint(n2="")
    code, out, _ = ctl("checkpoint", "--compare", "--timeout", "1s")
    assert (code, "checkpoint 9: not compared: no digest of n2" in out) == (1, True)


def transferred(request: Any) -> pb.TransferLeadershipResponse | None:
    """Return the answer of the leader n1, and None for a node that it does not know."""
    unknown = request.target == "nobody"
    return None if unknown else pb.TransferLeadershipResponse(unchanged=request.target == "n1")


def test_transfer_names_the_leader_and_a_refusal_exits_1(ctl: Ctl, threaded: Threaded) -> None:
    threaded.cluster.on_call = transferred
    assert ctl("transfer", "")[0] == 2  # "": an unset variable
    assert ctl("transfer", "n2")[:2] == (0, "transferred to n1\n")  # that leads by now
    assert ctl("transfer")[:2] == (0, "transferred to n1\n")
    assert ctl("transfer", "n1")[:2] == (0, "n1 is the leader already\n")
    code, out, err = ctl("transfer", "nobody")
    assert (code, out) == (1, "")
    assert err == "timerctl: no such node: 'nobody'\n"
    calls = threaded.cluster.called(pb.TransferLeadershipRequest)
    assert [each.target for each in calls] == ["n2", "", "n1", "nobody"]


def operated(request: Any) -> Any:
    """Return the answer of a node: n2 keeps a file that it can't read, n3 is silent, n4 refuses."""
    if request.node == "n3":
        return wire_error(pb.REASON_NOT_READY, "the node n3 did not answer")
    if request.node == "n4":
        return wire_error(pb.REASON_PERMISSION_DENIED, "no rule for operate")
    if isinstance(request, pb.SetLogLevelRequest):
        return pb.SetLogLevelResponse(node=request.node, before="info")
    if isinstance(request, pb.DumpStacksRequest):
        stack = pb.DumpStacksResponse.Stack(name="run", count=3, frames=["sleep tasks.py:1"])
        return pb.DumpStacksResponse(node=request.node, tasks=[stack], task_count=5, left_out=2)
    of, kept = pb.ReloadFilesResponse, request.node == "n2"
    file = of.File(setting="tls.access", path="access.toml", why="not TOML" * kept)
    file.result = of.RESULT_KEPT if kept else of.RESULT_TAKEN
    return of(node=request.node, files=[file])


def test_log_level_of_all_nodes_names_the_silent_one_and_stacks_are_counted(
    ctl: Ctl, threaded: Threaded
) -> None:
    threaded.cluster.on_call = operated
    code, out, _ = ctl("log-level", "cluster", "debug", "extra", "word")
    assert (code, out) == (2, "")
    code, out, _ = ctl("log-level", "debug")
    lines = out.splitlines()
    assert code == 3
    assert [line.split()[:3] for line in lines[1:3]] == [[n, "info", "debug"] for n in ("n1", "n2")]
    assert "the node n3 did not answer" in lines[3]
    down = f"--endpoints={threaded.cluster.address},127.0.0.1:1"
    code, _, err = ctl(down, "log-level", "n3", "debug")
    assert (code, "the node n3 did not answer" in err) == (3, True)
    code, out, _ = ctl("dump", "n2")
    assert code == 0
    assert out == (
        "node n2  5 tasks\n\ntask  3 x run\n    sleep tasks.py:1\n\n2 further tasks are left out\n"
    )


def test_reload_shows_each_file_and_fails_if_one_was_rejected_or_a_node_is_silent(
    ctl: Ctl, threaded: Threaded
) -> None:
    threaded.cluster.on_call = operated
    code, out, _ = ctl("reload")
    lines = [line.split() for line in out.splitlines()[1:4]]
    assert code == 3
    assert [line[:3] for line in lines[:2]] == [
        ["n1", "tls.access", "taken"],
        ["n2", "tls.access", "kept"],
    ]
    assert lines[1][3:] == ["not", "TOML"]
    assert "the node n3 did not answer" in out
    assert ctl("reload", "n1")[0] == 0
    assert [ctl("reload", name)[0] for name in ("n2", "n3")] == [3, 3]
    code, out, _ = ctl("reload", "n4", "n1")
    assert (code, "refused" in out, "taken" in out) == (1, True, True), "the others are shown"


def test_members_are_listed_and_changed_only_when_somebody_agrees(
    ctl: Ctl, threaded: Threaded
) -> None:
    changes: list[tuple[int, str]] = []
    lags = [900, 500, 7]  # the answer comes when the new voter has caught up

    def members(request: Any) -> pb.ListMembersResponse:
        if isinstance(request, pb.ChangeMembersRequest):
            changes.append((request.change, request.name))
        added = changes[-1:] == [(pb.ChangeMembersRequest.CHANGE_ADD, "n4")]
        voters = [pb.Member(name=name, voter=True, role="follower") for name in ("n1", "n2", "n3")]
        new = pb.Member(name="n4", voter=added, role="follower" if added else "learner")
        new.lag_entries = lags.pop(0) if added and lags else 0
        return pb.ListMembersResponse(epoch=3, leader="n1", members=[*voters, new])

    threaded.cluster.on_call = members
    code, out, _ = ctl("members")
    assert code == 0
    assert out.splitlines()[0] == "epoch 3  leader n1"
    assert [line.split()[2] for line in out.splitlines()[3:]] == ["yes", "yes", "yes", "no"]
    document = json.loads(ctl("members", "list", "-o", "json")[1])
    assert [row["name"] for row in document["members"]] == ["n1", "n2", "n3", "n4"]
    code, _, err = ctl("members", "add", "n4")
    assert (code, err, lags) == (0, "", [])
    assert ctl("members", "remove", "n4")[0] == 2  # nobody is there to be asked
    assert ctl("members", "remove", "n4", "--yes")[0] == 0
    code, _, err = ctl("members", "replace")
    assert (code, "required: NAME" in err) == (2, True)
    change = pb.ChangeMembersRequest
    assert changes == [(change.CHANGE_ADD, "n4"), (change.CHANGE_REMOVE, "n4")]
