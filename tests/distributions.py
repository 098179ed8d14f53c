"""The distributions `timer-client` and `timer-cluster`: built from this tree, and tried.

    python -m tests.distributions build DIR    a source archive and a wheel of each, into DIR
    python -m tests.distributions try DIR      install both into new venvs, and send a timer
    python -m tests.distributions keep DIR     keep a node's packages for the test of an upgrade

The client's wheel holds `timerclient` and nothing else. The server's depends on the client at the
same version. Both get their version from `timerclient/__init__.py`, and their requirements from
pyproject.toml. Each wheel is built from its source archive, so the archive is complete.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.local import LocalCluster

ROOT: Final = Path(__file__).parent.parent
STAGES: Final = ROOT / "build/distributions"
VENVS: Final = ROOT / "build/venvs"
BUILD_LOCK: Final = ROOT / "deploy/requirements-build.lock"
SERVER_LOCK: Final = ROOT / "deploy/requirements-server.lock"
BACKEND: Final = "from setuptools import build_meta as b; import sys; print(b.{step}(sys.argv[1]))"
KEPT: Final = ("cluster", "replication", "timer", "timerclient")
"""The packages of a running node."""
SCRIPT: Final = """
import sys
from importlib.metadata import version
import timerclient
from timerclient import TimerClient

assert timerclient.__version__ == version("timer-client"), timerclient.__version__
with TimerClient(sys.argv[1]) as client:
    timer = client.schedule("orders", b"cancel 4711", delay=0.2)
    with client.consumer("orders", group="billing") as consumer:
        [message] = consumer.receive(1, timeout=60)
        assert message.id == timer.id, (message, timer)
        message.ack()
"""


@dataclass(frozen=True, slots=True)
class Distribution:
    """One of the two: its name, its pyproject.toml, and the folders and files of its archive."""

    name: str
    project: str
    paths: tuple[str, ...]
    readme: str


CLIENT: Final = Distribution(
    "timer-client", "deploy/packages/client.toml", ("timerclient",), "docs/python.md"
)
SERVER: Final = Distribution(
    "timer-cluster",
    "deploy/packages/server.toml",
    (
        "timer",
        "replication",
        "cluster",
        "timerfake",
        "timerspark",
        "pyspark_timers",
        "pyspark_timerlog",
        "deploy",
        "chaos",
    ),
    "README.md",
)


def project_version() -> str:
    """Return the version of both distributions."""
    text = (ROOT / "timerclient/__init__.py").read_text()
    [version] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(version)


def requirements(which: Distribution) -> dict[str, list[str]]:
    """Return the requirements of a distribution by the name of their list."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    if which is CLIENT:
        wanted = {name: extras[name] for name in ("cli", "otel", "push")}
        return {"dependencies": project["dependencies"], **wanted}
    server = [f"{CLIENT.name}=={project_version()}", *extras["server"]]
    return {
        "dependencies": server,
        **{name: extras[name] for name in ("audit", "certs", "otel", "spark", "testing")},
    }


def stage(which: Distribution) -> Path:
    """Copy the tracked files of a distribution into a folder of their own; return it."""
    folder = STAGES / which.name
    shutil.rmtree(folder, ignore_errors=True)
    listed = _run("git", "ls-files", "--", *which.paths, cwd=ROOT)
    for name in [*listed.split(), "LICENSE", "NOTICE"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    shutil.copy2(ROOT / which.project, folder / "pyproject.toml")
    shutil.copy2(ROOT / which.readme, folder / "README.md")
    (folder / "requirements").mkdir()
    lists = {**requirements(which), "version": [project_version()]}
    for name, lines in lists.items():
        (folder / f"requirements/{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "MANIFEST.in").write_text(
        "recursive-include requirements *.txt\ngraft deploy\nglobal-exclude *.py[co]\n"
    )
    return folder


def build(out: Path) -> list[Path]:
    """Build source archives and wheels into a folder; return the wheels, the client's first."""
    out.mkdir(parents=True, exist_ok=True)
    wheels = []
    for which in (CLIENT, SERVER):
        archive = _backend("build_sdist", stage(which), out)
        unpacked = STAGES / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        unpack(archive, unpacked)
        [folder] = unpacked.iterdir()
        wheels.append(_backend("build_wheel", folder, out))
    return wheels


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of this project. Python 3.12 warns without a filter; 3.11.2 has none."""
    with tarfile.open(archive) as packed:
        packed.extraction_filter = lambda member, _: member
        packed.extractall(folder)


def _backend(step: str, folder: Path, out: Path) -> Path:
    # Two builds of one commit give the same bytes.
    epoch = _run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    env = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    command = [sys.executable, "-W", "ignore", "-c", BACKEND.format(step=step), str(out.absolute())]
    *_, name = _run(*command, cwd=folder, env=env).split()
    return out / name


def keep(out: Path) -> Path:
    """Keep the packages of a node for tests/cluster/test_upgrade.py; return the archive."""
    archive = ROOT / f"tests/data/timer-cluster-{project_version()}.tar.xz"
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as kept:
        for path in sorted(out.glob("*.whl")):
            with zipfile.ZipFile(path) as wheel:
                for each in sorted(wheel.infolist(), key=lambda member: member.filename):
                    if each.filename.split("/")[0] in KEPT and not each.filename.endswith(".pyi"):
                        member = tarfile.TarInfo(each.filename)
                        member.size = each.file_size
                        kept.addfile(member, io.BytesIO(wheel.read(each)))
    return archive


# ---- a trial


def try_out(out: Path) -> None:
    """Install both wheels into new venvs, and send a timer from each client to the server.

    One client has the oldest packages that it allows, the other the newest.
    """
    client, server = (_wheel(out, each) for each in (CLIENT, SERVER))
    pythons: dict[str, str] = {}
    for each in ("client", "oldest", "server"):
        shutil.rmtree(VENVS / each, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(VENVS / each), cwd=ROOT)
        pythons[each] = str(VENVS / each / "bin/python")
    with_server = pythons.pop("server")
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    oldest = [
        re.sub(r">=([^,]+),.*", r"==\1", each) for each in requirements(CLIENT)["dependencies"]
    ]
    _run(pythons["client"], *pip, str(client), cwd=out)
    _run(pythons["oldest"], *pip, str(client), *oldest, cwd=out)
    locked = (*pip, "--no-deps", "--require-hashes", "--no-build-isolation", "-r")
    _run(with_server, *locked, str(BUILD_LOCK), cwd=out)
    _run(with_server, *locked, str(SERVER_LOCK), cwd=out)
    # By name: a path would be in the bill of materials that is made of this environment.
    names = [f"{each.name}=={project_version()}" for each in (CLIENT, SERVER)]
    _run(with_server, *pip, "--no-deps", "--no-index", "--find-links", ".", *names, cwd=out)
    _run(with_server, "-m", "pip", "check", cwd=out)
    for tool in ("server/bin/timerd", "server/bin/timerctl", "client/bin/timerctl"):
        assert _run(str(VENVS / tool), "--version", cwd=out).split()[1] == project_version(), tool
    cluster = LocalCluster(VENVS / "cluster", 1, program=(str(VENVS / "server/bin/timerd"),))
    shutil.rmtree(cluster.directory, ignore_errors=True)
    try:
        cluster.start()
        for python in pythons.values():
            _run(python, "-W", "error", "-c", SCRIPT, ",".join(cluster.endpoints), cwd=out)
    finally:
        cluster.stop()
    print(f"{client.name} and {server.name}: installed, and a timer was delivered")


def _wheel(out: Path, which: Distribution) -> Path:
    name = which.name.replace("-", "_")
    return (out / f"{name}-{project_version()}-py3-none-any.whl").absolute()


def _run(*words: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a program; return its output. An installed tree must not be this one."""
    clean = {name: value for name, value in (env or os.environ).items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: Iterable[str]) -> None:
    """Run one of the commands."""
    command, out = arguments
    if command == "build":
        print("\n".join(map(str, build(Path(out)))))
    elif command == "keep":
        print(keep(Path(out)))
    else:
        try_out(Path(out))


if __name__ == "__main__":
    main(sys.argv[1:])
