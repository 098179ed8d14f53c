"""Run every command of docs/install.md on three hosts in network namespaces; needs root.

    python -m tests.hosts FOLDER     FOLDER keeps the hosts' logs, and /opt while dist/ is the same

Each host has an address of its own, and its own /etc and /var/lib as overlays. All share /opt. A
stand-in for systemctl (`systemctl.py`) starts the unit: its program, user, limits and read-only
system.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from chaos.suite.stage.network import Network
from tests.distributions import BUILD_LOCK, SERVER_LOCK

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs/install.md"
NAMES: Final = ("n1", "n2", "n3")
ONCE: Final = {"Certificates", "Checks"}
"""Sections that run on one machine."""
TIMEOUT_S: Final = 600
"""Longest time of one block of commands; the first installs all packages."""
MOUNTS: Final = r"""
for each in etc var/lib; do
  mkdir -p "$HOST_DIR/$each/upper" "$HOST_DIR/$each/work"
  mount -t overlay overlay "/$each" \
    -o "lowerdir=/$each,upperdir=$HOST_DIR/$each/upper,workdir=$HOST_DIR/$each/work"
done
mount --bind "$HOST_DIR/../opt" /opt
umask 027  # of root on a hardened host
export PATH="$HOST_DIR/../bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
exec sh -eu -c "$COMMANDS"
"""


def sections() -> Iterator[tuple[str, list[str]]]:
    """Yield the title of each section of the page that has commands, with its blocks."""
    for part in PAGE.read_text().split("\n## ")[1:]:
        blocks = re.findall(r"```sh\n(.*?)```", part, re.DOTALL)
        if blocks:
            yield part.partition("\n")[0], blocks


class Installed:
    """One host: its folder, its address, and the commands that run there."""

    def __init__(self, folder: Path, network: Network, name: str) -> None:
        self.name, self.folder = name, folder / name
        self._host = network.host(name)
        self.folder.mkdir(parents=True)

    def run(self, block: str) -> str:
        """Run a block of commands as root; return its output.

        Raises:
            SystemExit: a command failed.
        """
        prefix = self._host.address.rpartition(".")[0] + "."
        text = f"NAME={self.name} ADDRESS={self._host.address}\n" + "\n".join(
            line
            for line in block.replace("10.0.0.", prefix).splitlines()
            if not line.startswith(("NAME=", "ADDRESS="))
        )
        text = text.replace("$HOME/timer-certs", f"{self.folder.parent}/certs")
        text = text.replace("/tmp/timer/certs", f"{self.folder}/certs")
        text = text.replace("/tmp/timer/", f"{self.folder.parent}/timer/")
        # The operator's machine has the package `cryptography`, which the hosts need not have.
        text = text.replace("timerctl certs", f"{Path(sys.executable).parent}/timerctl certs")
        # The example of the settings has the addresses of the page.
        text = text.replace('sed -i "', f'sed -i "s/10\\.0\\.0\\./{prefix}/; ')
        env = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
        env |= {"HOST_DIR": str(self.folder), "COMMANDS": text}
        # The namespaces reach no package registry, so packages are installed from this machine.
        inside = () if "pip install" in text else self._host.inside
        words = [*inside, "unshare", "--mount", "sh", "-eu", "-c", MOUNTS]
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            log = self.folder / "timerd.log"
            told = log.read_text()[-2_000:] if log.exists() else ""
            sys.exit(f"{self.name}: {text}\n{done.stdout}{done.stderr}{told}")
        return done.stdout


def main(folder: Path) -> None:
    """Follow the page, section by section; stop the nodes at the end."""
    if os.geteuid() != 0:
        sys.exit("make deploy-hosts: root is needed, for network and mount namespaces")
    for each in ("timer", "certs", "bin", *NAMES):
        shutil.rmtree(folder / each, ignore_errors=True)
    wheels = [*(ROOT / "dist").glob("*.whl")]
    installed = folder / "opt"
    if installed.exists() and installed.stat().st_mtime < max(
        each.stat().st_mtime for each in wheels
    ):
        shutil.rmtree(installed)
    for each in ("opt", "timer", "bin"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    for file in [*wheels, BUILD_LOCK, SERVER_LOCK]:
        shutil.copy2(file, folder / "timer")
    shim = folder / "bin/systemctl"
    text = Path(__file__).with_name("systemctl.py").read_text()
    shim.write_text(f"#!{sys.executable}\n{text}")
    shim.chmod(0o755)
    with Network(NAMES) as network:
        hosts = [Installed(folder, network, name) for name in NAMES]
        try:
            for title, blocks in sections():
                print(f"## {title}", flush=True)
                # These run once; everything else on each host in turn.
                for host in hosts[:1] if title in ONCE else hosts:
                    output = "".join(host.run(block) for block in blocks)
                    if title == "Checks":
                        print(output, end="", flush=True)
                if title == "Certificates":  # the page says so, without a command
                    for host in hosts:
                        shutil.copytree(folder / "certs", host.folder / "certs")
            print(hosts[0].run(dict(sections())["Checks"][0]), end="")
        finally:
            for host in hosts:
                host.run("systemctl stop timerd")
    print("every command of docs/install.md succeeded on three hosts")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
