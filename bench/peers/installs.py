"""Peers' software, from package registries, in a cache outside the tree.

    $XDG_CACHE_HOME/timer-cluster/peers/
      clients-<hash>/     Python packages of requirements.lock (the Makefile installs them)
      debian/             servers of Debian packages, with the libraries that they need
      go/bin/             servers built from Go modules
      maven/<name>/lib/   jars of a server, with those that it depends on

The servers of Debian packages see debian/ as their root directory, so that neither their versions
nor their files depend on the packages of this machine. That takes a mount namespace: root, or user
namespaces.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

CACHE: Final = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "timer-cluster" / "peers"
)
SUITE: Final = "testing"
"""Debian's suite with the newest servers that passed its checks."""
PACKAGES: Final = ("redis-server", "beanstalkd", "rabbitmq-server")
_ESSENTIAL: Final = ("base-files", "bash", "coreutils", "dash", "grep", "hostname", "mawk", "sed")
"""Packages that Debian's packages use without naming them."""
_ENTER: Final = """
root=$1 data=$2; shift 2
mount --rbind /dev "$root/dev" && mount --rbind /proc "$root/proc" || exit 1
mkdir -p "$root$data" && mount --bind "$data" "$root$data" || exit 1
exec env LC_ALL=C chroot "$root" "$@"
"""
_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>peers</groupId><artifactId>{name}</artifactId><version>1</version>
<dependencies>{dependencies}</dependencies></project>
"""
_DEPENDENCY: Final = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)


class NotInstallable(RuntimeError):
    """This machine can't install a peer. The message gives the reason."""


def run(words: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return the output of a command.

    Raises:
        NotInstallable: there is no such command, or it failed.
    """
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=os.environ | (env or {}),
        )
    except FileNotFoundError as error:
        raise NotInstallable(f"{words[0]} is needed") from error
    if done.returncode:
        tail = (done.stderr or done.stdout)[-800:]
        raise NotInstallable(f"{' '.join(words)[:120]}: status {done.returncode}: {tail}")
    return done.stdout


# ---- Debian


def debian() -> Path:
    """Install the Debian packages of all peers, and return their root directory."""
    root = CACHE / "debian"
    if root.exists():
        return root
    part, apt = CACHE / "debian.part", CACHE / "apt"
    for directory in (part, apt):
        shutil.rmtree(directory, ignore_errors=True)
    for name in ("lists/partial", "archives/partial"):
        (apt / name).mkdir(parents=True)
    options = _apt_options(apt)
    run(["apt-get", *options, "update"])
    words = ["--yes", "--download-only", "--no-install-recommends", "install"]
    run(["apt-get", *options, *words, *_ESSENTIAL, *PACKAGES])
    archives = sorted((apt / "archives").glob("*.deb"))
    # Its links, such as /bin to /usr/bin, must be there before another package's files.
    archives.sort(key=lambda path: not path.name.startswith("base-files_"))
    part.mkdir()
    for archive in archives:
        run(["dpkg-deb", "--extract", str(archive), str(part)])
    names = [archive.name for archive in archives]
    (part / "packages").write_text("\n".join(names) + "\n")
    for name in ("dev", "proc", "tmp"):
        (part / name).mkdir(exist_ok=True)
    for name in ("hosts", "passwd", "group"):
        shutil.copy(f"/etc/{name}", part / "etc" / name)
    shutil.rmtree(apt)
    part.rename(root)
    return root


def debian_version(package: str) -> str:
    """Return the version of an installed Debian package."""
    for name in (CACHE / "debian" / "packages").read_text().split():
        if name.startswith(f"{package}_"):
            return name.split("_")[1].replace("%3a", ":")
    raise NotInstallable(f"the cache has no {package}")


def in_debian(data: Path, *words: str) -> list[str]:
    """Return the command that runs `words` among the Debian packages, with `data` writable."""
    data.mkdir(parents=True, exist_ok=True)
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    place = [str(CACHE / "debian"), str(data.resolve())]
    return ["unshare", "--mount", *user, "sh", "-c", _ENTER, "sh", *place, *words]


def _apt_options(apt: Path) -> list[str]:
    """Return the options of an apt that knows `SUITE` alone, from the mirror of this machine."""
    sites = run(["apt-get", "indextargets", "--format", "$(ORIGIN) $(SITE)"]).splitlines()
    site = next((line.split()[1] for line in sites if line.startswith("Debian ")), None)
    if site is None:
        raise NotInstallable("apt has no sources of Debian")
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "sources.list").write_text(f"deb [signed-by={key}] {site} {SUITE} main\n")
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": apt,
        "Dir::Cache::archives": apt / "archives",
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


# ---- Go and Maven


def go(module: str, version: str) -> Path:
    """Build the program of a Go module, and return its path."""
    program = CACHE / "go" / "bin" / f"{module.split('/')[2]}-{version}"
    if not program.exists():
        run(["go", "install", f"{module}@{version}"], {"GOBIN": str(program.parent)})
        (program.parent / module.split("/")[2]).rename(program)
    return program


def jars(name: str, version: str, *artifacts: str) -> Path:
    """Fetch artifacts, as "group:name", with their dependencies. Return the jars' directory."""
    home = CACHE / "maven" / f"{name}-{version}"
    if not (home / "lib").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        each = [_DEPENDENCY.format(*artifact.split(":"), version) for artifact in artifacts]
        (home / "pom.xml").write_text(_POM.format(name=name, dependencies="".join(each)))
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={home / 'part'}"]
        run(["mvn", "-q", "-B", "-f", str(home / "pom.xml"), *goal])
        (home / "part").rename(home / "lib")
    return home / "lib"
