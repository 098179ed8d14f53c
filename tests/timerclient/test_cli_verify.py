"""`timerctl verify`: when it ends, what it shows, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.timerclient.conftest import Ctl, Threaded
from timerclient.cli import cli_verify
from timerclient.proto import timer_pb2 as pb


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_verify, "CHECK_INTERVAL_S", 0.01)


def verified(name: str, began: int = 1, ended: int = 0, **more: Any) -> pb.NodeVerification:
    return pb.NodeVerification(
        node=name, reachable=True, began_at_ms=began, ended_at_ms=ended, files=3, **more
    )


def answered(
    *nodes: pb.NodeVerification, agreement: pb.Agreement.ValueType = pb.AGREEMENT_SAME
) -> pb.GetVerificationResponse:
    for node in nodes:
        node.digest = node.digest or "abc" * node.reachable
    return pb.GetVerificationResponse(nodes=nodes, digest_index=9, agreement=agreement)


class Passes:
    """Answers of the nodes to a verification."""

    def __init__(self) -> None:
        self.verifications: list[pb.GetVerificationResponse] = []
        """Answers in their order. The first is also that of the start; the last one stays."""
        self.begun: list[str] = []
        """The nodes that requests to begin a verification named."""

    def answer(self, request: Any) -> pb.BeginVerificationResponse | pb.GetVerificationResponse:
        answers = self.verifications
        if isinstance(request, pb.BeginVerificationRequest):
            self.begun.append(request.node)
            return pb.BeginVerificationResponse(nodes=answers[0].nodes)
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
def passes(threaded: Threaded) -> Passes:
    passes = Passes()
    threaded.cluster.on_call = passes.answer
    return passes


def test_verify_waits_for_all_passes_and_begins_again_on_a_node_that_restarted(
    ctl: Ctl, passes: Passes
) -> None:
    silent = pb.NodeVerification(node="n2", error="refused")
    passes.verifications = [
        answered(verified("n1"), verified("n2")),
        answered(verified("n1"), verified("n2")),
        answered(verified("n1", ended=5), silent, agreement=pb.AGREEMENT_UNKNOWN),
        answered(verified("n1", ended=5), verified("n2", began=0)),
        answered(verified("n1", ended=5), verified("n2", began=3, ended=6)),
    ]
    code, out, _ = ctl("-o", "json", "verify")
    found = json.loads(out)
    assert (code, found["verdict"], found["agreement"]) == (0, "ok", "SAME")
    assert [each["ended_at_ms"] for each in found["nodes"]] == [5, 6]
    assert passes.begun == ["", "n2"]


def test_verify_takes_no_pass_of_a_node_that_it_has_not_begun_or_joined(
    ctl: Ctl, passes: Passes
) -> None:
    """The node was silent at the start. Its last pass is an old one, or its own."""
    silent = pb.NodeVerification(node="n1", error="refused")
    for last in (verified("n1", ended=2), verified("n1", began=3)):
        passes.begun.clear()
        passes.verifications = [
            *(answered(silent), answered(silent), answered(last)),
            answered(verified("n1", began=5, ended=7)),
        ]
        code, out, _ = ctl("-o", "json", "verify", "n1")
        assert (code, json.loads(out)["nodes"][0]["began_at_ms"]) == (0, 5)
        assert passes.begun == ["n1", "n1"]


def test_verify_goes_on_without_a_learner_that_stops_until_it_is_back(
    ctl: Ctl, passes: Passes
) -> None:
    """The nodes leave out one that neither answers nor votes."""
    passes.verifications = [
        answered(verified("n1"), verified("n2")),
        answered(verified("n1"), verified("n2")),
        answered(verified("n1", ended=5)),
    ]
    code, out, _ = ctl("-o", "json", "verify")
    assert (code, [each["node"] for each in json.loads(out)["nodes"]]) == (0, ["n1"])
    assert passes.begun == [""]
    passes.verifications = [
        answered(verified("n1")),
        answered(verified("n1"), verified("n2", began=2, ended=3)),  # an old pass, or its own
        answered(verified("n1", ended=5), verified("n2", began=7, ended=8)),
    ]
    code, out, _ = ctl("-o", "json", "verify")
    assert (code, [each["ended_at_ms"] for each in json.loads(out)["nodes"]]) == (0, [5, 8])
    assert passes.begun == ["", "", "n2"]


def test_verify_exits_1_for_damage_and_different_states_and_3_for_a_node_that_is_silent(
    ctl: Ctl, passes: Passes
) -> None:
    whole = verified("n1", ended=5)
    damage = pb.NodeVerification.Damage(file="/f", byte=7, what="/f: corrupt at byte 7")
    damaged = verified("n2", ended=5, damages=[damage], repair="fetches")
    silent = pb.NodeVerification(node="n2", error="refused")

    passes.verifications = [answered(whole, damaged)] * 2
    code, out, _ = ctl("verify")
    assert (code, "/f: corrupt at byte 7\nn2: fetches\n" in out) == (1, True)
    passes.verifications = [
        answered(verified("n1"), damaged),
        answered(verified("n1"), damaged),
        answered(verified("n1"), silent, agreement=pb.AGREEMENT_UNKNOWN),
        answered(whole, verified("n2", began=0)),
    ]
    code, out, _ = ctl("verify")
    assert (code, "/f: corrupt at byte 7\nn2: the node has restarted" in out) == (1, True)

    other = verified("n2", ended=5, digest="0123")
    passes.verifications = [
        answered(verified("n1"), other),
        answered(verified("n1"), other, agreement=pb.AGREEMENT_DIFFER),
        answered(whole, other),  # a node that was healed agrees again
    ]
    code, out, _ = ctl("verify")
    assert (code, "checkpoint 9: the nodes DIFFER" in out) == (1, True)

    passes.verifications = [answered(whole, silent, agreement=pb.AGREEMENT_UNKNOWN)]
    code, out, _ = ctl("--timeout", "100ms", "verify")
    assert code == 3
    cells = out.splitlines()[2].split()
    assert [cells[0], cells[1], cells[-1]] == ["n2", "-", "refused"]
    assert out.endswith("the states are not compared: no digest of n2\n")
    passes.verifications = [answered(whole, verified("n2"))]
    code, out, _ = ctl("verify", "--wait", "0")
    assert (code, "reads on" in out) == (3, True)
    passes.verifications = [pb.GetVerificationResponse(nodes=[whole], digest_index=9)]
    code, out, _ = ctl("verify", "n1")
    assert (code, len(out.splitlines())) == (0, 2)


def test_verify_of_a_stopped_node_takes_no_options_of_a_running_one(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = ctl("verify", "--data", str(tmp_path))
    assert (code, "it is not a data directory of timerd" in err) == (3, True)
    for more in (["n1"], ["--wait", "1s"]):
        assert ctl("verify", "--data", str(tmp_path), *more)[0] == 2
    see = "see: timerctl verify --help\n"
    monkeypatch.setattr(cli_verify, "ENTRY_POINTS", "timerctl.absent")
    code, _, err = ctl("verify", "--data", str(tmp_path))
    assert (code, err) == (2, f"timerctl: --data needs the distribution timer-cluster\n{see}")
