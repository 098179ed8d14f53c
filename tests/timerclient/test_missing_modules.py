"""The texts about modules that are not installed."""

import importlib.metadata
import tomllib
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.timerclient.conftest import Ctl
from timerclient.cli.missing_modules import why_missing


def test_missing_module_names_the_extra_of_the_installed_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = Message()
    for extra in ("audit", "certs"):  # the wheel of `make dist` has no extra `server`
        metadata["Provides-Extra"] = extra
    wheel = SimpleNamespace(metadata=metadata, version="0.2.0")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: wheel)
    named = "pip install 'timer_cluster-0.2.0-py3-none-any.whl[audit]'"
    assert why_missing(ModuleNotFoundError(name="pyspark"), "server,audit").endswith(named)
    bare = "pip install timer_cluster-0.2.0-py3-none-any.whl"
    assert why_missing(ModuleNotFoundError(name="aiohttp"), "server").endswith(bare)


def test_client_alone_names_the_package_of_the_other_commands(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    for name in project["entry-points"]["timerctl.commands"]:
        text = f"timerctl: {name} comes with the package timer-cluster\n"
        assert ctl(name, "up", "--dir", "x") == (1, "", text)
