"""Nodes forked from a process that has imported their modules, because imports take a second.

    test process                  template, one for each node's name       node
    program, log  --- socket -->  forks one that forks again and ends -->  runs the program, as a
                  <-- its pid --                                           child of the test process

The kernel kills a node whose test process has ended, as an interrupt of pytest ends its workers.
A node that restarts itself execs, and some tests of tests/cluster/test_timerd.py run programs. Each
node of a cluster has its own template, so that hashes of strings differ between nodes, as in
production.
"""

import array
import atexit
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
CLONE_NEWNET: Final = 0x4000_0000
LIBC: Final = ctypes.CDLL(None)
BYTES_MAX: Final = 1 << 16
USUAL_FILES: Final = 1_024
"""Limit of open files in a usual shell; nodes raise it themselves."""
PID: Final = array.array("i").itemsize


class Forked:
    """A child process that this process did not start itself; it has `poll` as a Popen has."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status; negative is the number of a signal. None: the process runs."""
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


@cache
def _template(name: str) -> socket.socket:
    """Return a socket to the template for nodes of a name; start the template if needed."""
    del name
    assert LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-m", "tests.cluster.template"]
        template = subprocess.Popen(words, stdin=theirs.fileno(), cwd=Path(__file__).parents[2])

    def end() -> None:
        ours.close()
        template.wait()

    atexit.register(end)
    return ours


def launch(name: str, words: Sequence[str], log: int, errors: int | None = None) -> Forked:
    """Start `[nsenter --net=…] python -m MODULE …`, a kind of `timerd`, as the node of a name.

    `log` is the file descriptor of the node's output, `errors` of its standard error. None: `log`.
    """
    at = words.index(sys.executable)
    inside, program = words[:at], words[at:]
    assert program[1] == "-m", words
    assert not inside or (inside[0] == "nsenter" and len(inside) == 2), words
    network = "".join(inside[1:]).removeprefix("--net=")
    template = _template(name)
    files = [log] if errors is None else [log, errors]
    socket.send_fds(template, [json.dumps([network, program]).encode()], files)
    return Forked(int.from_bytes(template.recv(PID), sys.byteorder))


def main() -> None:
    """Fork the requested nodes until the test process closes the socket."""
    from chaos.suite.stage import faulty_timerd
    from cluster.node import process, timerd

    del process  # only its import is needed
    programs = {each.__name__: each.main for each in (timerd, faulty_timerd)}
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_FILES, files))
    gc.collect()
    gc.freeze()
    asked = socket.socket(fileno=os.dup(0))
    tester = os.getppid()
    while True:
        data, logs, _, _ = socket.recv_fds(asked, BYTES_MAX, 2)
        if not data:
            return
        read, write = os.pipe()
        between = os.fork()
        if not between:
            itself = os.getpid()
            node = os.fork()
            if node:
                os.write(write, node.to_bytes(PID, sys.byteorder))
                os._exit(0)
            for each in (asked.detach(), read, write):
                os.close(each)
            _end_with(tester, itself)
            network, words = json.loads(data)
            _enter(network)
            _become(words, logs, programs[words[2]])
        os.waitpid(between, 0)  # from here on the node is a child of the test process
        asked.sendall(os.read(read, PID))
        for each in (read, write, *logs):
            os.close(each)


def _end_with(tester: int, between: int) -> None:
    """Become a child of the test process, when `between` has ended. End with the test process."""
    while os.getppid() == between:
        time.sleep(0.001)
    assert LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != tester:
        os._exit(1)


def _enter(network: str) -> None:
    """Enter a network namespace; an empty path stays in this one."""
    if network:
        with Path(network).open() as file:
            assert LIBC.setns(file.fileno(), CLONE_NEWNET) == 0, network


def _become(words: list[str], logs: list[int], run: Callable[[list[str]], int]) -> NoReturn:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for each, standard in ((null, 0), (logs[0], 1), (logs[-1], 2)):
        os.dup2(each, standard)
    for each in (null, *logs):
        os.close(each)
    sys.orig_argv[:] = words
    sys.argv[:] = words[2:]
    sys.exit(run(words[3:]))


if __name__ == "__main__":
    main()
