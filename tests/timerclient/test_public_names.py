"""The door of the client: its names are loaded when they are first used."""

import ast
import importlib
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import timerclient
from tests.parsing import parsed


def names_for_type_checkers() -> dict[str, str]:
    """Return the module of each public name, as the imports for type checkers give it."""
    tree = parsed(Path(timerclient.__file__).read_text())
    return {
        alias.name: node.module or ""
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_names_are_the_same_for_type_checkers_and_at_run_time() -> None:
    said = names_for_type_checkers()
    assert {*said, "errors"} == {*timerclient.__all__}
    assert {name: f"timerclient.{of}" for name, of in timerclient._MODULE_OF.items()} == said
    for name, module in said.items():
        assert getattr(timerclient, name) is getattr(importlib.import_module(module), name)
    assert {*timerclient.__all__, "__version__"} <= {*dir(timerclient)}
    assert "class TimerClient" in pydoc.plain(pydoc.render_doc(timerclient))
    with pytest.raises(AttributeError, match="no attribute 'TimerKlient'"):
        timerclient.TimerKlient  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("module", ["timerclient", "cluster.node.timerd"])
def test_import_loads_no_grpc_and_quiets_it_before_it_is_loaded(module: str) -> None:
    code = (
        "import os, sys; os.environ.pop('GRPC_VERBOSITY', None)\n"
        f"import {module}; assert 'grpc' not in sys.modules\n"
        "assert os.environ['GRPC_VERBOSITY'] == 'NONE'\n"
        "from timerclient import *; assert 'grpc' in sys.modules; TimerClient.schedule"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
