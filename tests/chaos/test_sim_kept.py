"""Kept seeds: each found a defect once, finds none now, and names a test of that defect."""

import ast
from pathlib import Path

import pytest

from chaos.sim.play import play
from tests.chaos.planted.kept_seeds import KEPT, KeptSeed

ROOT = Path(__file__).parent.parent.parent

every_one = pytest.mark.parametrize("kept", KEPT, ids=lambda kept: str(kept.task.seed))


@pytest.mark.long
@every_one
def test_kept_seed_passes(kept: KeptSeed) -> None:
    outcome = play(kept.task)
    assert outcome.exit_status == 0, outcome.story


@every_one
def test_kept_seed_has_a_test_of_its_defect(kept: KeptSeed) -> None:
    path, name = kept.test.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
