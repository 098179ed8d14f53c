"""timerctl worker: its errors, and its life as a process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.timerclient.conftest import Ctl
from timerclient import GroupHeld, InvalidRequest, TimerApp, Worker
from timerclient.cli import cli_worker, timerctl, worker_process
from timerclient.cli.cli_args import UsageError
from timerclient.cli.cli_errors import FAILED, USAGE
from timerclient.cli.cli_worker import EXIT_UNFINISHED, select_handlers
from timerclient.worker import worker as worker_module
from timerfake import AsyncFakeApp

APP = """
from timerclient import TimerApp
app = TimerApp({url!r})
empty = TimerApp()
@app.timer("t", group="g")
def f() -> None: ...
"""


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("shop_app", "'shop_app': must be MODULE:NAME, such as myapp:app"),
        ("shop_none:app", "no module 'shop_none' in "),
        ("shop_none.sub:app", "no module 'shop_none' in "),
        ("shop_app:ap", "'shop_app:ap': shop_app has no ap; its apps: app, empty"),
        ("shop_app:f.nope", "shop_app has no f.nope"),
        ("shop_app:__name__", "must be a TimerApp, not str"),
        ("shop_app:empty", "has no handler: decorate a function with @empty.timer"),
        ("shop_broken:app", "can't import shop_broken: ZeroDivisionError: division by zero ("),
        ("shop_lacks:app", "can't import shop_lacks: ModuleNotFoundError: No module named 'shop_x"),
        ("shop_typo:app", "shop_typo: SyntaxError: invalid syntax ({}/shop_typo.py:2)"),
        ("shop_app.py:app", "no module 'shop_app.py' in {} or on PYTHONPATH; write MODULE with"),
        ("shop_app:app --concurrency 0", "concurrency = 0: must be 1 to 10000"),
        ("shop_app:app --port 70000", "--port 70000: must be 0 to 65535"),
        ("shop_app:app --topic u", "--topic u: no handler has it, only: t (group g)"),
        (
            "shop_app:app --topic t --group h",
            "no handler has it in these topics and groups, only: t ",
        ),
        ("shop_app:app --topic default/t --group g", "must be host:port"),
        ("shop_app:app", "must be host:port"),
    ],
)
def test_worker_that_can_not_start_says_why(
    place: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ctl: Ctl,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "shop_app.py").write_text(APP.format(url="timers://nonsense"))
    (tmp_path / "shop_broken.py").write_text("1 / 0\n")
    (tmp_path / "shop_lacks.py").write_text("import shop_x\n")
    (tmp_path / "shop_typo.py").write_text("app = 1\ndef f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("shop_app", "shop_broken", "shop_lacks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    code, out, err = ctl("worker", *place.split())
    sys.modules.pop("shop_app", None)
    assert (code, out) == (USAGE, "")
    assert text.format(tmp_path) in err
    assert "Traceback" not in err
    assert "worker started" not in caplog.text


def test_worker_in_a_deleted_directory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctl: Ctl
) -> None:
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    text = "timerctl: the working directory: No such file or directory"
    assert ctl("worker", "shop_app:app") == (USAGE, "", f"{text}\n")


def test_help_names_the_variables_that_count_beside_a_url(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        timerctl.main(["worker", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in ("URL", *(f"TLS_{each}" for each in ("CA", "CERT", "KEY", "SERVER_NAME")), "TOKEN"):
        assert f"$TIMERS_{name}" in text
    assert "default if the app's URL does not count: $TIMERCTL_TLS_CA" in text
    assert "default: $TIMERCTL" not in text


def test_worker_runs_the_handlers_of_the_topics_and_groups_that_are_named() -> None:
    app = TimerApp()
    places = [("a", "g"), ("a", "h"), ("b", "g"), ("c", "g")]
    for topic, group in places:
        app.timer(topic, group=group)(lambda: None)
    for topics, groups, chosen in (
        ([], [], places),
        (["a"], [], places[:2]),
        (["a", "b"], ["g"], [places[0], places[2]]),
        ([], ["h"], places[1:2]),
    ):
        worker = Worker(app, handlers=select_handlers(app, topics, groups))
        assert [(each.metrics.topic, each.metrics.group) for each in worker.runners] == chosen
    with pytest.raises(UsageError, match="--topic b: no handler has it in these topics"):
        select_handlers(app, ["a", "b"], ["h"])
    foreign = TimerApp().timer("a", group="g")(lambda: None)
    for wrong in ([], [foreign]):
        with pytest.raises(InvalidRequest, match="must be handlers of the app, at least one"):
            Worker(app, handlers=wrong)


@pytest.mark.parametrize(("limit_s", "code"), [(0.0, 0), (None, EXIT_UNFINISHED)])
async def test_process_ends_after_the_drain_though_a_thread_of_a_handler_runs(
    limit_s: float | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, begun, go = TimerApp(), asyncio.Event(), threading.Event()

    @app.timer("orders", group="billing")
    async def bill() -> None:
        try:
            async with asyncio.timeout(limit_s):  # 0: the handler's own timeout leaves the thread
                waiting = asyncio.to_thread(go.wait, 60)
                asyncio.get_running_loop().call_soon(begun.set)
                await waiting
        finally:
            ended.set()

    ended, exits = asyncio.Event(), list[tuple[object, bool]]()

    def leave(code: int) -> None:
        exits.append((code, go.is_set()))
        raise SystemExit

    monkeypatch.setattr("os._exit", leave)
    run_exit_functions = lambda: exits.append(("atexit", go.is_set()))  # noqa: E731
    monkeypatch.setattr(worker_process, "_run_exit_functions", run_exit_functions)

    def close_sync(timeout: float = 1.0) -> None:
        assert timeout > 0
        exits.append((signal.getsignal(signal.SIGTERM), go.is_set()))

    monkeypatch.setattr(app, "close_sync", close_sync)
    async with AsyncFakeApp(app) as timers:
        timers.cluster.works.clear()
        timers._worker.stop()  # type: ignore[union-attr]  # another worker takes its place
        await timers._worker_task  # type: ignore[misc]
        worker = Worker(app, drain=0)
        serving = asyncio.create_task(cli_worker._serve(worker, Namespace(port=None)))
        await bill.schedule()
        await begun.wait()
        if limit_s is not None:
            await ended.wait()
            await timers.settle()
        worker.stop()
        with pytest.raises(SystemExit):
            worker_process.end_process(worker, await serving)
        assert exits == [(signal.SIG_DFL, False), ("atexit", False), (code, False)]
        go.set()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("app:app", "timerctl: consumer 'first' has it\n"),
        ("-o json app:app", '{\n  "error": {\n    "reason": "GROUP_HELD"'),
    ],
)
def test_process_of_a_rejected_consumer_waits_for_no_thread_of_a_handler(
    words: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = TimerApp("timers://127.0.0.1:1")
    app.timer("orders", group="billing")(lambda: None)
    worker = Worker(app)

    async def fetch() -> None:
        raise GroupHeld("consumer 'first' has it")

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(worker.runners[0], "fetch", fetch)
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(worker_process, "_run_exit_functions", lambda: None)
    monkeypatch.setattr("sys.argv", ["timerctl", "worker", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli_worker.run_worker(worker, Namespace(port=None))
    assert ended.value.code == FAILED
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.parametrize(
    ("stops", "drained_s", "closes_s"),
    [(1, 0, [13, 13.5]), (1, 14, [0.5, 0.5]), (2, 0, [1, 1.5])],
)
async def test_closes_have_the_rest_of_the_stop_and_half_a_second_at_least(
    stops: int, drained_s: int, closes_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, now_s, given_s = TimerApp("timers://127.0.0.1:1"), 100.0, list[float]()
    app.timer("orders", group="billing")(lambda: None)
    worker = Worker(app, drain=10)

    def cut_off() -> None:
        nonlocal now_s
        now_s += drained_s

    async def end(within_s: float, *closes: Coroutine[Any, Any, None]) -> None:
        given_s.append(within_s)
        await asyncio.gather(*closes)

    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(worker_module, "_close_all", end)
    monkeypatch.setattr(worker, "_cancel_calls", cut_off)
    for _ in range(stops):
        worker.stop()
    now_s = 100.0
    await worker.run()
    assert given_s == closes_s


PROCESS = """
import asyncio, atexit, concurrent.futures, multiprocessing, os, signal, time
from argparse import Namespace
from timerclient import TimerApp, Worker
from timerclient.cli.cli_worker import run_worker
from timerclient.worker.handler_runner import HandlerRun

app, left = TimerApp("timers://127.0.0.1:1"), []
mp = multiprocessing.get_context("fork")

class OneCall(Worker):
    async def run(self):  # of the first handler, as at a message
        await self.runners[0]._call(HandlerRun(None, 0.0, 0.0), {})
        await asyncio.sleep(0)
        print("stops", self._stops)
        await self._drain()

def run(function):
    global one_call
    app.timer("t", group="g")(function)
    one_call = OneCall(app, drain=0)
    run_worker(one_call, Namespace(port=None))
"""
TERMINATED = """
@run
def handler():
    children = [mp.Process(target=time.sleep, args=[9]) for _ in range(8)]
    for number, child in zip([signal.SIGTERM, signal.SIGINT] * 4, children):
        child.start()
        os.kill(child.pid, number)
    for child in children:
        child.join()
        print(child.exitcode)
"""
LEFT = """
@run
{} handler():
    for error in None, SystemExit(5), SystemExit("text"), ValueError:
        if not (pid := os.fork()):
            print(end="child ")
            if error:
                raise error
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
MASKED = """
def work():
    print("child", *signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)

@run
def handler():
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    child = mp.Process(target=work)
    child.start()
    child.join()
    print("parent", *signal.pthread_sigmask(signal.SIG_SETMASK, ()))
    child = mp.Process(target=work)
    child.start()
    child.join()
    print("parent", *signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
INTERRUPTED_FORK = """
import sys

def interrupted(how, mask):
    signal.pthread_sigmask = real
    try:
        return real(how, mask)
    finally:
        signal.raise_signal(signal.SIGUSR1)

real = signal.pthread_sigmask
sys.unraisablehook = lambda each: print(each.exc_type.__name__, flush=True)
signal.signal(signal.SIGUSR1, lambda *_: exit(4))

@run
async def handler():
    signal.pthread_sigmask = interrupted
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    print("blocked:", *real(signal.SIG_BLOCK, ()))
"""
FORKS_AT_ONCE = """
import threading

def in_turn(how, mask):
    before = real(how, mask)
    if how == signal.SIG_BLOCK and mask:  # the last step before the fork
        if threading.current_thread() is second:
            blocked.set()
            forked.wait()
        else:
            second.start()
            blocked.wait()
    return before

def fork(own):
    real(signal.SIG_SETMASK, {own})
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    print(*real(signal.SIG_SETMASK, ()))
    forked.set()

real, blocked, forked = signal.pthread_sigmask, threading.Event(), threading.Event()
second = threading.Thread(target=fork, args=[signal.SIGUSR2])

@run
async def handler():
    signal.pthread_sigmask = in_turn
    fork(signal.SIGUSR1)
    second.join()
"""
OWN_HANDLER = """
def work(ready):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    ready.set()
    time.sleep(60)

@run
async def handler():
    child = mp.Process(target=work, args=[ready := mp.Event()])
    child.start()
    ready.wait()
    child.terminate()
    child.join()
    print(child.exitcode)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, (seen := asyncio.Event()).set)
    signal.raise_signal(signal.SIGUSR1)  # the loop handles signals in their order
    await seen.wait()
"""
FORKED_AT_EXIT = """
def fork():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    if not (pid := os.fork()):
        signal.raise_signal(signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

@run
def handler():
    atexit.register(fork)
"""
EXITS = """
async def exits():
    raise SystemExit(3)

@run
async def handler():
    try:
        await asyncio.create_task(exits())
    except SystemExit:
        print("failed")
"""
EXITS_AT_SIGNAL = """
signal.signal(signal.SIGUSR1, lambda *_: exit(CODE))

def in_loop():
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGUSR1)

def twice_in_loop():
    in_loop()
    in_loop()

def in_step_of_the_worker():
    signal.raise_signal(signal.SIGUSR1)

def in_task_of_the_worker():
    OneCall._beat_s = property(fset=lambda *_: signal.raise_signal(signal.SIGUSR1))
    left.append(asyncio.create_task(one_call._beat()))

@run
async def handler():
    PLACE()
    await one_call._stop_event.wait()
"""
HUNG_UP = """
@run
async def handler():
    for _ in range(2):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, (seen := asyncio.Event()).set)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGUSR1)  # the loop handles signals in their order
        await seen.wait()
    atexit.register(signal.raise_signal, signal.SIGHUP)
"""
DEFAULT = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
RELOADS = "signal.signal(signal.SIGHUP, lambda *_: print('reload'))"
POOLS = """
def ignores_sigterm(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)

def prints_sigterm(ready):
    signal.signal(signal.SIGTERM, lambda *_: (print("terminated", flush=True), os._exit(0)))
    ready.set()
    time.sleep(60)

@run
async def handler():
    left.append(pool := mp.Pool(2))
    print(pool.map(abs, [-1]))
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        left.append(executor := concurrent.futures.ProcessPoolExecutor(2, mp_context=context))
        print(executor.submit(abs, -2).result())
    for target in (ignores_sigterm, prints_sigterm):
        mp.Process(target=target, args=[ready := mp.Event()]).start()
        ready.wait()
    atexit.register(print, "exit handler", flush=True)
    print("left", flush=True)
"""
INTERRUPTED = """
def close_sync(timeout):
    signal.raise_signal(signal.SIGINT)

@run
async def handler():
    app.close_sync = close_sync
    atexit.register(print, "exit handler")
"""
AWAY = """
from timerclient.worker import worker
worker.CANCEL_S = worker.CLOSE_S = 0

@run
def handler():
    app.thread_client.submit("t", b"p")
    begun_s = time.monotonic()
    atexit.register(lambda: print("closed within 20 s:", time.monotonic() < begun_s + 20))
"""


def run_program(program: str) -> tuple[int, str]:
    """Run a worker's process; return its exit code and stdout."""
    quiet = "ignore:This process (pid=:DeprecationWarning"  # Python 3.12 and later warn of threads
    command = [sys.executable, "-W", quiet, "-c", PROCESS + program]
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=60, check=False, env=env
    )
    return done.returncode, done.stdout


def test_signal_to_a_process_that_a_handler_forked_ends_it_and_does_not_stop_the_worker() -> None:
    assert run_program(TERMINATED) == (0, "-15\n-2\n" * 4 + "stops 0\n")


@pytest.mark.parametrize(
    "define", ["def", "async def", "@lambda async_: lambda: async_()\nasync def"]
)
def test_process_that_a_handler_forks_ends_as_it_leaves_the_handler(define: str) -> None:
    assert run_program(LEFT.format(define)) == (0, "child 0\nchild 5\nchild 1\nchild 1\nstops 0\n")


def test_fork_keeps_the_signal_mask_of_its_thread_in_parent_and_child() -> None:
    blocked = f"child {signal.SIGTERM}\nparent {signal.SIGTERM}\n"
    assert run_program(MASKED) == (0, f"{blocked}child\nparent\nstops 0\n")


def test_fork_that_an_exception_of_a_signal_handler_interrupts_blocks_no_signals() -> None:
    assert run_program(INTERRUPTED_FORK) == (0, "SystemExit\nblocked:\nstops 0\n")


def test_threads_that_fork_at_the_same_time_keep_their_signal_masks() -> None:
    assert run_program(FORKS_AT_ONCE) == (0, f"{signal.SIGUSR1}\n{signal.SIGUSR2}\nstops 0\n")


def test_forked_process_that_handles_a_signal_does_not_stop_the_worker() -> None:
    assert run_program(OWN_HANDLER) == (0, "7\nstops 0\n")


def test_process_that_an_exit_handler_forks_keeps_the_signal_handlers_of_the_application() -> None:
    assert run_program(FORKED_AT_EXIT) == (0, "stops 0\n7\n")


def test_process_ends_though_its_handlers_have_left_pools_and_processes() -> None:
    assert run_program(POOLS) == (0, "[1]\n2\n2\nleft\nstops 0\nexit handler\nterminated\n")


def test_exit_handlers_run_though_a_signal_interrupts_the_close_of_the_client() -> None:
    assert run_program(INTERRUPTED) == (0, "stops 0\nexit handler\n")


def test_client_of_threads_is_closed_in_the_time_of_the_stop_though_the_cluster_is_away() -> None:
    assert run_program(AWAY) == (0, "stops 0\nclosed within 20 s: True\n")


def test_end_of_the_terminal_stops_a_worker_once_unless_the_application_handles_sighup() -> None:
    assert run_program(DEFAULT + HUNG_UP) == (0, "stops 1\n")
    assert run_program(NOHUP + HUNG_UP) == (0, "stops 0\n")
    assert run_program(RELOADS + HUNG_UP) == (0, "reload\nreload\nstops 0\nreload\n")


@pytest.mark.parametrize(
    ("place", "argument", "code", "printed"),
    [
        ("in_loop", "", 0, "stops 1\n"),
        ("in_loop", "'no'", 1, "stops 1\n"),
        ("twice_in_loop", "4", 4, "stops 2\n"),
        ("in_step_of_the_worker", "4", 4, ""),
        ("in_task_of_the_worker", "4", 4, "stops 1\n"),
    ],
)
def test_exit_in_a_signal_handler_of_the_application_stops_the_worker_with_its_code(
    place: str, argument: str, code: int, printed: str
) -> None:
    program = EXITS_AT_SIGNAL.replace("PLACE", place).replace("CODE", argument)
    assert run_program(program) == (code, printed)


async def test_tasks_of_a_worker_run_no_coroutines_of_asyncio() -> None:
    app, before = TimerApp(), asyncio.all_tasks()
    app.timer("orders", group="billing")(lambda: None)
    async with AsyncFakeApp(app):
        tasks: list[Any] = [*asyncio.all_tasks() - before]
        modules = [each.get_coro().cr_frame.f_globals["__name__"] for each in tasks]
    assert "timerclient.worker.worker" in modules
    assert not any(each.startswith("asyncio") for each in modules)


def test_exit_in_a_task_of_a_handler_does_not_end_the_worker() -> None:
    assert run_program(EXITS) == (0, "failed\nstops 0\n")


LEVELS = """
import logging
from argparse import Namespace
from timerclient.cli.cli_worker import begin_log
begin_log(Namespace(log_level="LEVEL"))
for name in ("timerclient.worker", "grpc._cython.cygrpc", "asyncio"):
    print(logging.getLevelName(logging.getLogger(name).getEffectiveLevel()))
"""


@pytest.mark.parametrize(
    ("level", "levels"), [("debug", "DEBUG\nINFO\nINFO\n"), ("error", 3 * "ERROR\n")]
)
def test_debug_log_of_a_worker_has_no_lines_of_grpc_and_asyncio(level: str, levels: str) -> None:
    assert run_program(LEVELS.replace("LEVEL", level)) == (0, levels)


def test_worker_leaves_the_logging_of_an_application_as_it_is() -> None:
    own = "\nimport logging\nlogging.basicConfig(level='DEBUG')\n"
    assert run_program(own + LEVELS.replace("LEVEL", "debug")) == (0, 3 * "DEBUG\n")
