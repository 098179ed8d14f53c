"""Elections, leases and promotion of several replicas, as texts: tests/replication/elections."""

from pathlib import Path

import pytest

from tests.datadriven import run_file
from tests.replication.elections_player import ElectionsPlayer

ELECTIONS = sorted((Path(__file__).parent / "elections").glob("*.txt"))


@pytest.mark.parametrize("path", ELECTIONS, ids=lambda path: path.stem)
def test_election(path: Path, rewrite: bool) -> None:
    run_file(path, ElectionsPlayer().play, rewrite=rewrite)
