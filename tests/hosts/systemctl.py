"""A stand-in for systemctl on a host of `python -m tests.hosts`: it runs one unit, without systemd.

It reads the unit from /etc/systemd/system and applies the program, user, umask, open files,
environment file and state directory, and a read-only system (ProtectSystem=strict). `start` returns
after READY=1, as for Type=notify. It must run alone, so it imports nothing of the tree.
"""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HOST = Path(os.environ["HOST_DIR"])
PID = HOST / "timerd.pid"
UNIT = Path("/etc/systemd/system/timerd.service")
CONFINE = r"""
mount --bind "/var/lib/$STATE" "/var/lib/$STATE"
for each in / /etc /opt /var/lib; do mount -o remount,ro,bind "$each"; done
mount -t tmpfs tmpfs /tmp
umask "$MASK"
exec prlimit --nofile="$FILES" setpriv --reuid="$USER" --regid="$GROUP" --clear-groups \
  --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


def setting(name: str) -> str:
    [value] = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def start() -> None:
    if runs():
        return
    address = f"@timerd-{HOST.name}-{os.getpid()}"
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin", "NOTIFY_SOCKET": address}
    file = Path(setting("EnvironmentFile").removeprefix("-"))
    if file.exists():
        pairs = (line.partition("=") for line in file.read_text().splitlines() if "=" in line)
        env |= {name: value for name, _, value in pairs}
    env |= {"STATE": setting("StateDirectory"), "USER": setting("User"), "GROUP": setting("Group")}
    env |= {"MASK": setting("UMask"), "FILES": str(open_files())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:])
        manager.settimeout(1)
        words = ["unshare", "--mount", "sh", "-eu", "-c", CONFINE, "sh"]
        with (HOST / "timerd.log").open("ab") as log:
            node = subprocess.Popen(
                [*words, *setting("ExecStart").split()],
                env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd="/",
            )  # fmt: skip
        PID.write_text(str(node.pid))  # unshare, sh, prlimit and setpriv all exec: one pid
        notice = b""
        while not notice.startswith(b"READY=1\n"):
            if node.poll() is not None:
                sys.exit(f"timerd ended with status {node.returncode}")
            with contextlib.suppress(TimeoutError):
                notice = manager.recv(4096)


def open_files() -> int:
    """Return LimitNOFILE, or this machine's own limit if it may not be raised."""
    return min(int(setting("LimitNOFILE")), resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def stop() -> None:
    if not runs():
        return
    os.kill(int(PID.read_text()), signal.SIGTERM)
    deadline_s = time.monotonic() + int(setting("TimeoutStopSec"))
    while runs():
        if time.monotonic() > deadline_s:
            sys.exit("timerd still runs after TimeoutStopSec")
        time.sleep(0.05)
    PID.unlink()


def runs() -> bool:
    try:
        stat = Path(f"/proc/{int(PID.read_text())}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if words[0] in ("stop", "restart"):
        stop()
    if words[0] in ("enable", "start", "restart"):
        start()


main()
