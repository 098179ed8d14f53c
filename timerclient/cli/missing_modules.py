"""The error text of a command with a missing module: the module, and the extra to install."""

import re
from typing import Final

from timerclient.cli.cli_errors import one_line

DISTRIBUTION: Final = "timer-cluster"
CLIENT: Final = "timer-client"


def why_missing(error: Exception, extras: str = "", command: str = "") -> str:
    """Return the text about an import error of a command, with the extra to install.

    `extras`: those of the command, comma-separated; empty: all with the module, or the one with the
    name of the command.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"can't be loaded: {type(error).__name__}: {one_line(error)}"
    known = [extras] if extras else _extras_with(error.name.partition(".")[0])
    known = [command] if command in known else known
    if known:
        return f"needs {error.name}: pip install {_requirement(known)}"
    return f"needs the module {error.name}, which is not installed"


def _requirement(known: list[str]) -> str:
    """Return pip's arguments for one of some extras: of the installed wheel, or of a clone."""
    import importlib.metadata

    clone = " or ".join(f"'.[{extras}]'" for extras in known) + f" in a clone of {DISTRIBUTION}"
    for name in (CLIENT, DISTRIBUTION):
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        offered = installed.metadata.get_all("Provides-Extra") or []
        if name == DISTRIBUTION or {*",".join(known).split(",")} <= {*offered}:
            break
    else:
        return clone
    if "server" in offered:  # the wheel of `make dist` always requires the server's packages
        return clone
    wheel = f"{name.replace('-', '_')}-{installed.version}-py3-none-any.whl"
    lists = [[each for each in extras.split(",") if each in offered] for extras in known]
    return " or ".join(f"'{wheel}[{','.join(extras)}]'" if extras else wheel for extras in lists)


def _extras_with(module: str) -> list[str]:
    """Return the extras of this distribution that install a module."""
    import importlib.metadata

    wanted = {module.replace("_", "-").lower(), f"{module.replace('_', '-').lower()}-client"}
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
        if name and extra and name[0].replace("_", "-").lower() in wanted:
            found.append(extra[1])
    return [extra for extra in found if extra != "dev"]
