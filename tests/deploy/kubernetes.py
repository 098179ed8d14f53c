"""The project's manifests, as they are read."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]


CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


TOOLS: Final = CACHE / "timer-cluster/tools/bin"


BUILT: Final = ROOT / "build/bin"
"""A tool of this tree: another tree may have another one."""


def call(tool: str, *words: str, stdin: str = "") -> str:
    """Run a tool of `make deploy-check`; skip the test without it, except in that target."""
    path = shutil.which(tool, path=f"{BUILT}:{TOOLS}:{os.environ['PATH']}")
    if path is None:
        assert "DEPLOY_CHECK" not in os.environ, f"no {tool}"
        pytest.skip(f"no {tool}: make deploy-check installs it")
    done = subprocess.run([path, *words], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
