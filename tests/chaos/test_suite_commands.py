"""The suite's commands: what they refuse, remove and pass on; nothing is played."""

import json
import os
from pathlib import Path

import pytest

from chaos.history.history import OWNER, RunFolder
from chaos.suite import suite_run
from chaos.suite.scenarios import STRIKES_APART_MAX
from chaos.suite.stage import stage as stages
from chaos.suite.stage.plan import Need
from chaos.suite.suite_run import RunPlan, claimable, clear
from deploy.local import LaunchError, LocalCluster
from timerclient.cli import timerctl


def test_run_with_the_same_seed_plays_the_same_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[tuple[Path, RunPlan]] = []

    def play(target: RunFolder, each: RunPlan) -> int:
        played.append((target.root, each))
        return 0

    monkeypatch.setattr(suite_run, "execute", play)
    words = ["run", "mix", "--minutes", "1", "--seed", "7", "--plain", "--rate", "9"]
    for folder in ("first", "again"):
        more = ["--workloads", "herd,singles", "--dir", str(tmp_path / folder)]
        assert timerctl.main(["chaos", *words, *more]) == 0
    (where, one), (elsewhere, other) = played
    assert (where, elsewhere) == (tmp_path / "first", tmp_path / "again")
    assert one == other
    assert one.options.workloads == ("herd", "singles")
    assert one.strikes_apart_max == STRIKES_APART_MAX
    assert len(one.schedule) > 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mixed"], "scenario = 'mixed': must be one of kill-leader"),
        (["mix", "--nodes", "2"], "nodes = 2: must be 3 .. 7"),
        (["mix", "--minutes", "0.1"], "minutes = 0.1: must be 10 s to 10,080 minutes"),
        (["mix", "--minutes", "inf"], "minutes = inf: must be 10 s to 10,080 minutes"),
        (["mix", "--minutes", "nan"], "minutes = nan: must be 10 s to 10,080 minutes"),
        (["mix", "--workloads", "unifrom"], "workload = 'unifrom': must be one of"),
        (["mix", "--rate", "0"], "rate_per_s = 0: must be positive"),
        (["isolate", "--plain"], "isolate needs network: plain processes"),
    ],
)
def test_wrong_argument_is_named(
    tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "run" / OWNER
    earlier.parent.mkdir()
    earlier.touch()
    assert timerctl.main(["chaos", "run", *words, "--dir", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err
    assert earlier.exists(), "nothing is removed for a run that can't be"


@pytest.mark.skipif(os.geteuid() != 0, reason="is not root anyway")
def test_who_is_not_root_is_told_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    played: list[RunPlan] = []
    monkeypatch.setattr(suite_run, "execute", lambda _, each: played.append(each))
    words = ["--minutes", "0.5", "--dir", str(tmp_path / "run")]
    timerctl.main(["chaos", "run", "mix", *words])
    assert played[0].missing == dict.fromkeys(Need, "not root")
    assert timerctl.main(["chaos", "run", "power-cut", *words]) == 2
    assert capsys.readouterr().err.endswith(" needs disks: not root\n")
    assert len(played) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("refused", [True, False])
def test_look_at_the_machine_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    monkeypatch.setattr(stages, "capabilities", lambda _: {Need.DISKS: "none here"})
    monkeypatch.setattr(suite_run, "execute", lambda *_: 0)
    words = ["chaos", "run", "power-cut" if refused else "mix", "--minutes", "0.5"]
    assert timerctl.main([*words, "--dir", str(tmp_path)]) == (2 if refused else 0)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "thesis.tex").touch()
    clear(RunFolder(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_list_names_every_scenario_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert timerctl.main(["chaos", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("mix ") for line in lines)
    assert any(line.startswith("isolate ") and line.endswith("[root: network]") for line in lines)
    assert any(line.startswith("herd ") for line in lines)


def test_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(LaunchError, match=r"is not the folder of a run: name another folder"):
        claimable(tmp_path)


def test_somebodys_own_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"nodes": []}')
    RunFolder(tmp_path).about.write_text('{"clock_error_ms": 1000}')  # for an audit of theirs
    with pytest.raises(LaunchError, match=r"is not the folder of a run: name another folder"):
        claimable(tmp_path)


def test_nodes_of_a_dead_harness_end_before_their_folder_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / OWNER).touch()
    node = {"name": "n1", "pid": 1, "grpc": "", "http": "", "data": "n1"}
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": [node]}))
    killed = list[str]()
    monkeypatch.setattr(LocalCluster, "kill_together", lambda _, *names: killed.extend(names))
    clear(claimable(tmp_path))
    assert killed == ["n1"]
    assert not tmp_path.exists()
