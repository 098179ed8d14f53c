"""Contexts: named settings of a connection, kept in a file of the user.

    $XDG_CONFIG_HOME/timerctl/contexts.json, else ~/.config/timerctl/contexts.json
    {"current": "prod", "contexts": {"prod": {"endpoints": "10.0.0.1:7401", "tls_ca": "/…/ca.pem"}}}

Each setting of a connection has the value of its option, else of its variable, else of the context,
else the default. The context is that of --context, else of TIMERCTL_CONTEXT, else the current one;
`none` stands for no context. The file holds paths of keys and tokens, not these. Its mode is 600.
TIMERCTL_TOKEN has a token itself. It counts before the file's path in a variable or a context.
"""

import argparse
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from timerclient.cli.cli_args import (
    DEFAULT_ENDPOINTS,
    TLS_OPTIONS,
    TOKEN_VARIABLE,
    UsageError,
    variable_of,
)

SETTINGS: Final = (
    "endpoints",
    *(f"tls_{name.replace('-', '_')}" for name, _ in TLS_OPTIONS),
    "token_file",
)
"""Names of the settings of a connection, as in the file and in the parsed command line."""
NONE: Final = "none"
_CONTEXT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(slots=True)
class Contexts:
    """The contexts of a file. Changes are kept by `save` only."""

    path: Path
    current: str = ""
    """Name of the current context; empty: none."""
    named: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name -> settings of `SETTINGS` that it has."""

    def get(self, name: str) -> dict[str, str]:
        """Return the settings of a context.

        Raises:
            UsageError: There is no such context.
        """
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise UsageError(f"no such context: {name!r}; {self.path} has: {known}")
        return self.named[name]

    def save(self) -> None:
        """Replace the file atomically. Its mode is 600; a new directory has mode 700.

        Raises:
            UsageError: The file can't be written.
        """
        import tempfile  # takes 5 ms

        document = {"current": self.current or None, "contexts": self.named}
        written = Path()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, text = tempfile.mkstemp(dir=self.path.parent, prefix=".contexts-")  # mode 600
            written = Path(text)
            with open(number, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            written.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                written.unlink()
            raise UsageError(f"can't write {self.path}: {error.strerror}") from error


def path_of_contexts() -> Path:
    """Return the path of the user's file, which may not exist.

    Raises:
        UsageError: Neither XDG_CONFIG_HOME nor the home directory is known.
    """
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():  # the XDG specification: relative paths are ignored
        try:
            folder = Path.home() / ".config"
        except RuntimeError as error:
            raise UsageError("no directory for contexts: set XDG_CONFIG_HOME or HOME") from error
    return folder / "timerctl" / "contexts.json"


def load(*, is_required: bool = True) -> Contexts:
    """Return the user's contexts; none, if there is no file.

    `is_required`: False: none, too, if this user may not read the file, as with another user's
    HOME.

    Raises:
        UsageError: The file can't be read, or a key of it is wrong.
    """
    path = path_of_contexts()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Contexts(path)
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError) and not is_required:
            return Contexts(path)
        raise UsageError(f"can't read {path}: {error}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    top = _object(path, "the file", document, ("current", "contexts"))
    named = _object(path, "contexts", top.get("contexts", {}))
    for name, settings in named.items():
        for key, value in _object(path, f"contexts.{name}", settings, SETTINGS).items():
            if not isinstance(value, str):
                raise UsageError(f"{path}: contexts.{name}.{key} = {value!r}: must be a string")
    current = top.get("current") or ""
    if not isinstance(current, str) or (current and current not in named):
        raise UsageError(f"{path}: current = {current!r}: must be the name of a context, or null")
    return Contexts(path, current, named)


def _object(path: Path, key: str, value: Any, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return an object of the file. `known`: its possible keys; empty: any."""
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {key} = {value!r}: must be an object")
    for each in value:
        if known and each not in known:
            raise UsageError(f"{path}: {key}: unknown key {each!r}; known: {', '.join(known)}")
    return value


def check_context_name(name: str) -> None:
    """Check the name of a new context.

    Raises:
        UsageError: The name is not allowed.
    """
    if name == NONE or not _CONTEXT_NAME.fullmatch(name):
        limit = f"1 to 64 letters, digits, '.', '_' and '-', a letter or digit first; not {NONE!r}"
        raise UsageError(f"context = {name!r}: must be {limit}")


@dataclass(frozen=True, slots=True)
class SettingInEffect:
    """One setting of a connection."""

    value: str
    """Empty: unset."""
    source: str
    """The option, variable or context that it comes from; `default`: none of them."""


def name_in_effect(args: argparse.Namespace, contexts: Contexts) -> str:
    """Return the name of the context that a command line uses; empty: none."""
    given = args.context or os.environ.get(variable_of("context")) or contexts.current
    return "" if given == NONE else given


def settings_in_effect(args: argparse.Namespace) -> dict[str, SettingInEffect]:
    """Return each setting of `SETTINGS` with its source.

    Raises:
        UsageError: The file of contexts is wrong, or has no such context.
    """
    given = args.context or os.environ.get(variable_of("context"))
    needed = bool(given) or not (args.endpoints or os.environ.get(variable_of("endpoints")))
    contexts = Contexts(path_of_contexts()) if given == NONE else load(is_required=needed)
    name = name_in_effect(args, contexts)
    own = contexts.get(name) if name else {}
    return {each: _setting(args, each, name, own) for each in SETTINGS}


def _setting(
    args: argparse.Namespace, key: str, name: str, own: Mapping[str, str]
) -> SettingInEffect:
    if (given := vars(args)[key]) is not None:
        return SettingInEffect(given, f"--{key.replace('_', '-')}")
    variable = variable_of(key)
    if found := os.environ.get(variable):
        return SettingInEffect(found, variable)
    if key in own:
        return SettingInEffect(own[key], f"context {name}")
    return SettingInEffect(DEFAULT_ENDPOINTS if key == "endpoints" else "", "default")


def apply_context(args: argparse.Namespace) -> None:
    """Set each absent setting of a command line, as `settings_in_effect` finds it.

    Raises:
        UsageError: The file of contexts is wrong, or has no such context.
    """
    found = settings_in_effect(args)
    for key, setting in found.items():
        setattr(args, key, setting.value)
    args.token = None
    if not found["token_file"].source.startswith("--"):
        args.token = os.environ.get(TOKEN_VARIABLE) or None
