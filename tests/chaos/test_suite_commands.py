"""The suite's commands: what they refuse, remove and pass on; nothing is played."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from chaos.commands import chaos_commands
from chaos.history.history import OWNER, RunFolder
from chaos.suite import suite_commands
from chaos.suite.show import Bill, Show, claimable, clear
from chaos.suite.stage import stage as stages
from chaos.suite.stage.plan import Need, RunOptions, Strike
from deploy.local import LaunchError, LocalCluster


def test_replay_plays_the_same_schedule_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[tuple[Path, Bill]] = []

    def play(target: RunFolder, each: Bill) -> int:
        played.append((target.root, each))
        target.root.mkdir(exist_ok=True)
        Show(target, each, lambda _: [])._write("running")
        return 0

    monkeypatch.setattr(suite_commands, "_play", play)
    first, again = tmp_path / "first", tmp_path / "again"
    words = ["run", "mix", "--minutes", "1", "--seed", "7", "--plain", "--dir", str(first)]
    assert chaos_commands.main([*words, "--workloads", "herd,singles", "--rate", "9"]) == 0
    assert chaos_commands.main(["replay", str(first), "--dir", str(again)]) == 0
    (where, one), (elsewhere, other) = played
    assert (where, elsewhere) == (first, again)
    assert one == other
    assert one.options.workloads == ("herd", "singles")
    assert len(one.schedule) > 5


def told_run(folder: Path, *nemeses: str, **options: Any) -> Path:
    """Leave the run.json of a run of these strikes."""
    strikes = [Strike(at_s=1, nemesis=nemesis) for nemesis in nemeses]
    each = Bill(scenario="isolate", seed=1, options=RunOptions(**options), schedule=strikes)
    Show(RunFolder(folder), each, lambda _: [])._write("stopped")
    return folder


@pytest.mark.parametrize(
    ("nemeses", "missing", "says"),
    [
        (["isolate", "power-cut"], {Need.NETWORK: "not root"}, ""),
        (["isolate", "isolate"], {Need.NETWORK: "not root"}, "network: not root\n"),
        (["isolate", "power-cut"], dict.fromkeys(Need, "no"), "disks: no; network: no\n"),
        ([], dict.fromkeys(Need, "no"), ""),
    ],
)
def test_replay_of_which_no_strike_can_fall_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    nemeses: list[str], missing: dict[Need, str], says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(suite_commands, "_play", lambda *_: 0)
    monkeypatch.setattr("chaos.suite.stage.stage.capabilities", lambda _: missing)
    earlier = told_run(tmp_path / "first", *nemeses)
    words = ["replay", str(earlier), "--dir", str(tmp_path / "again")]
    assert chaos_commands.main(words) == (2 if says else 0)
    assert capsys.readouterr().err.endswith(f"isolate needs {says}" if says else "")


@pytest.mark.parametrize("plain", [False, True])
def test_replay_does_without_what_was_done_without_only_if_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    played: list[Bill] = []

    def play(_: RunFolder, each: Bill) -> int:
        played.append(each)
        return 0

    monkeypatch.setattr(suite_commands, "_play", play)
    monkeypatch.setattr("chaos.suite.stage.stage.capabilities", lambda _: {})
    earlier = told_run(tmp_path / "first", "kill", without=(Need.DISKS,), plain=plain)
    assert suite_commands.replay(earlier, tmp_path / "again") == 0
    assert played[0].missing.keys() == ({*Need} if plain else set())


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
    assert chaos_commands.main(["run", *words, "--dir", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err
    assert earlier.exists(), "nothing is removed for a run that can't be"


UNKNOWN_WORKLOAD = json.dumps(
    {"scenario": "mix", "seed": 1, "left_out": [], "schedule": []}
    | {"options": {"workloads": ["unifrom"], "without": []}}
)


@pytest.mark.parametrize(
    ("told", "again", "says"),
    [
        (None, "again", "has no run.json"),
        ("{", "again", "Expecting property name"),
        ('{"seed": 1}', "again", "is not of this version of the suite: KeyError('options')"),
        (
            '{"options": {}, "schedule": [{"lane": "nodes", "at": 1}]}',
            "again",
            "is not of this version of the suite",
        ),
        (UNKNOWN_WORKLOAD, "again", "workload = 'unifrom': must be one of"),
        ("{}", "run", "must not be the folder of the run that is replayed"),
    ],
)
def test_replay_of_what_is_no_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    told: str | None, again: str, says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(suite_commands, "_play", lambda *_: 0)  # no node is started to find it out
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    if told is not None:
        run.about.write_text(told)
    assert chaos_commands.main(["replay", str(run.root), "--dir", str(tmp_path / again)]) == 2
    assert says in capsys.readouterr().err
    assert run.about.exists() == (told is not None)


def test_folder_that_is_not_there_is_not_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos_commands.main(["clean", "--dir", str(tmp_path / "gone")]) == 2
    assert "no such folder" in capsys.readouterr().err
    for name, nodes in (("1", "[]"), ("2", '[{"name": "n1"}]')):
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER).touch()
        (tmp_path / name / "cluster.json").write_text(f'{{"nodes": {nodes}}}')
    assert chaos_commands.main(["clean", "--dir", str(tmp_path)]) == 0
    assert "left alone: " in capsys.readouterr().err, "who can't be read costs the others nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="is not root anyway")
def test_who_is_not_root_is_told_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    played: list[Bill] = []
    monkeypatch.setattr(suite_commands, "_play", lambda _, each: played.append(each))
    words = ["--minutes", "0.5", "--dir", str(tmp_path / "run")]
    chaos_commands.main(["run", "mix", *words])
    assert played[0].missing == dict.fromkeys(Need, "not root")
    assert chaos_commands.main(["run", "power-cut", *words]) == 2
    assert capsys.readouterr().err.endswith(" needs disks: not root\n")
    assert len(played) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("refused", [True, False])
def test_empty_folder_is_its_owners_again_once_the_machine_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    def capabilities(folder: Path) -> dict[Need, str]:
        folder.mkdir()
        return {Need.DISKS: "none here"}

    monkeypatch.setattr(stages, "capabilities", capabilities)
    monkeypatch.setattr(suite_commands, "_play", lambda *_: 0)
    folder = tmp_path / "mine"
    folder.mkdir()
    words = ["run", "power-cut" if refused else "mix", "--minutes", "0.5", "--dir", str(folder)]
    assert chaos_commands.main(words) == (2 if refused else 0)
    assert not folder.exists() or not [*folder.iterdir()]
    folder.mkdir(exist_ok=True)
    (folder / "thesis.tex").touch()
    clear(RunFolder(folder))
    assert (folder / "thesis.tex").exists()


def test_list_names_every_scenario_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos_commands.main(["list"]) == 0
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


def test_folder_where_nodes_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / OWNER).touch()
    node = {"name": "n1", "pid": 1, "grpc": "", "http": "", "data": "n1"}
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": [node]}))
    with monkeypatch.context() as running:
        running.setattr(LocalCluster, "is_running", lambda *_: True)
        with pytest.raises(LaunchError, match="n1 still run: a run is being played there, or its"):
            claimable(tmp_path)
    clear(claimable(tmp_path))
    assert not tmp_path.exists()
