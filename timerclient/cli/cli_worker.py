"""timerctl worker: runs the handlers of an application.

The module is found as `python -m` finds it: in the present directory, then on PYTHONPATH. The
cluster is that of an option of this command line, else the app's own or TIMERS_URL, else that of
timerctl's variables and context.
"""

import argparse
import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from timerclient.cli.cli_args import Commands, UsageError, duration, tls_of, token_of
from timerclient.cli.cli_errors import OK, exit_code, print_error
from timerclient.cli.contexts import SETTINGS, apply_context
from timerclient.cli.worker_process import end_process, stopping_on_signals
from timerclient.values import cluster_url
from timerclient.values.errors import TimerError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task

    from timerclient.worker.timer_app import TimerApp, TimerHandler
    from timerclient.worker.worker import Worker

LOG: Final = logging.getLogger("timerclient.worker")
EXIT_UNFINISHED: Final = 1
"""Exit code after a drain that did not wait for all handlers."""


class WorkerCommands(Commands):
    """The command `worker`."""

    def register_worker(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the arguments."""
        del common
        parser.description = (
            f"{parser.description} The app's URL, or ${cluster_url.VARIABLE}, names the cluster. "
            f"A URL that begins with {cluster_url.SECURE} takes the files that it does not name "
            f"from {_variables_text(cluster_url.VARIABLE_OF.values())}, or the token itself from "
            f"${cluster_url.TOKEN}. The URL does not count if this command line has an option of "
            "the connection. Example: timerctl worker myapp:app --port 9100"
        )
        parser.add_argument("app", metavar="MODULE:NAME", help="a TimerApp, such as myapp:app")
        for name, what in (("topic", "topics"), ("group", "groups")):
            parser.add_argument(
                f"--{name}",
                metavar=name.upper(),
                dest=what,
                action="append",
                default=[],
                help=f"run only the handlers of this {name}; may be repeated; default: all",
            )
        parser.add_argument(
            "--concurrency",
            metavar="N",
            type=int,
            help="calls of each handler at a time; default: the handler's own number",
        )
        add_process_options(parser)
        parser.set_defaults(run=self._run)

    def _run(self, args: argparse.Namespace) -> int:
        check_port(args)
        app = load_app(args.app)
        begin_log(args)
        _connect(app, args)
        from timerclient.worker.worker import Worker

        handlers = select_handlers(app, args.topics, args.groups)
        worker = Worker(app, handlers=handlers, concurrency=args.concurrency, drain=args.drain)
        return run_worker(worker, args)


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a process that runs handlers: its stop, port and log."""
    parser.add_argument(
        "--drain",
        metavar="DURATION",
        type=duration,
        default=timedelta(seconds=25),
        help="longest wait for running handlers after SIGTERM; default: 25s",
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=int,
        help="serve /healthz, /readyz and /metrics; 0: a free port; default: none",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of that port; default: 127.0.0.1"
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="if the application does not configure logging; debug: with the stacks of "
        "handlers' errors; default: info",
    )


def check_port(args: argparse.Namespace) -> None:
    """Check the option --port.

    Raises:
        UsageError: It is no port.
    """
    if args.port is not None and not 0 <= args.port <= 65_535:
        raise UsageError(f"--port {args.port}: must be 0 to 65535")


def begin_log(args: argparse.Namespace) -> None:
    """Write the log on stderr, unless the application has set it."""
    if logging.root.handlers:
        return
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if logging.root.level < logging.INFO:
        for other in ("grpc", "asyncio"):
            logging.getLogger(other).setLevel(logging.INFO)


def run_worker(worker: "Worker", args: argparse.Namespace) -> NoReturn:
    """Run a worker until a signal ends it or a consumer is rejected, and end the process.

    Raises:
        TimerError, UsageError: It can't start.
    """
    import asyncio

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        end_process(worker, _run_until_end(loop, worker, loop.create_task(_serve(worker, args))))


def _run_until_end(loop: "AbstractEventLoop", worker: "Worker", serving: "Task[int]") -> int:
    """Run the loop until the worker has ended; return the exit code.

    The loop also ends at SystemExit in a task that a handler has started, and then runs on. The
    handler that awaits the task gets the exception. Any other SystemExit, such as by a signal
    handler of the application, stops the worker, and its code is returned after the drain.
    """
    exited: SystemExit | None = None
    while True:
        try:
            code = loop.run_until_complete(serving)
            return code if exited is None else _code_of(exited)
        except SystemExit as error:
            if serving.done():
                return _code_of(error)
            if _is_of_application_task(error):
                LOG.exception("a task that a handler started raised SystemExit; the worker runs on")
            else:
                exited = error
                worker.stop()


def _is_of_application_task(error: SystemExit) -> bool:
    """Return whether a task of the application raised it: no task of ours or gRPC, nor the loop.

    The loop runs a task in the frame of its outermost coroutine.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_flags & inspect.CO_COROUTINE:
            return not frame.f_globals["__name__"].startswith(("timerclient.", "grpc."))
    return False


def _code_of(error: SystemExit) -> int:
    """Return the exit code, as the interpreter: 1 for a text, which is printed."""
    if error.code is None or isinstance(error.code, int):
        return error.code or OK
    sys.stderr.write(f"{error.code}\n")
    return 1


def _variables_text(variables: Iterable[str]) -> str:
    *others, last = (f"${name}" for name in variables)
    return f"{', '.join(others)} and {last}"


async def _serve(worker: "Worker", args: argparse.Namespace) -> int:
    """Run the worker; return the exit code."""
    with ExitStack() as opened:
        opened.enter_context(stopping_on_signals(worker))
        if args.port is not None:
            from timerclient.worker.worker_port import WorkerPort

            try:
                port = opened.enter_context(WorkerPort(worker, args.host, args.port))
            except OSError as error:
                raise UsageError(f"--port {args.port} on {args.host}: {error.strerror}") from error
            LOG.info("http port: %s:%d", args.host, port.port)
        _ = worker.app.client  # a wrong URL ends the worker here
        names = ", ".join(each.handler.name for each in worker.runners)
        LOG.info("worker started: %s", names)
        try:
            await worker.run()
            code = EXIT_UNFINISHED if worker.left_running else OK
        except TimerError as error:
            print_error(error, sys.argv[1:], args)
            code = exit_code(error)
        LOG.info("worker stopped")
    return code


def _connect(app: "TimerApp", args: argparse.Namespace) -> None:
    """Let the app use the cluster of the command line, if that names one or the app does not."""
    names_one = any(vars(args)[each] is not None for each in SETTINGS) or args.context is not None
    if names_one or not app.url():
        from timerclient.worker.timer_app import AppConnection

        apply_context(args)
        options = {**app.connection.options, "credentials": tls_of(args), "token": token_of(args)}
        app.connect(AppConnection(args.endpoints, options))


def select_handlers(
    app: "TimerApp", topics: Sequence[str], groups: Sequence[str]
) -> "list[TimerHandler[..., Any]]":
    """Return the app's handlers that have one of the topics and one of the groups. Empty: all.

    Raises:
        UsageError: None of them has a topic or a group that is named.
    """
    chosen = app.handlers
    for option, wanted in (("topic", topics), ("group", groups)):
        chosen = [each for each in chosen if not wanted or _has(each, option, wanted)]
    for option, wanted in (("topic", topics), ("group", groups)):
        for name in wanted:
            if not any(_has(each, option, [name]) for each in chosen):
                more = " in these topics and groups" if topics and groups else ""
                places = (
                    f"{each.options.topic} (group {each.options.group})" for each in app.handlers
                )
                text = f"no handler has it{more}, only: {', '.join(places)}"
                raise UsageError(f"--{option} {name}: {text}")
    return chosen


def _has(handler: "TimerHandler[..., Any]", option: str, wanted: Sequence[str]) -> bool:
    topic, group = handler.options.place
    if option == "group":
        return group in wanted
    return topic in (each.removeprefix("default/") for each in wanted)


def load_app(place: str) -> "TimerApp":
    """Return the app at MODULE:NAME.

    Raises:
        UsageError: There is no such module or name, it can't be imported, or it is no TimerApp; or
            the working directory was deleted.
    """
    module, colon, name = place.partition(":")
    if not (module and colon and name):
        raise UsageError(f"{place!r}: must be MODULE:NAME, such as myapp:app")
    try:
        directory = os.getcwd()
    except OSError as error:
        raise UsageError(f"the working directory: {error.strerror}") from error
    if directory not in sys.path:
        sys.path.insert(0, directory)
    found: Any = _import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place!r}: {module} has no {name}{_apps_of(found)}")
        found = getattr(found, part)
    from timerclient.worker.timer_app import TimerApp

    if not isinstance(found, TimerApp):
        raise UsageError(f"{place!r}: must be a TimerApp, not {type(found).__name__}")
    if not found.handlers:
        raise UsageError(f"{place!r}: has no handler: decorate a function with @{name}.timer(…)")
    return found


def _import_module(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # the application's code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            text = f"no module {missing!r} in {os.getcwd()} or on PYTHONPATH"
            if module.endswith(".py"):
                text += "; write MODULE without .py"
            raise UsageError(text) from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where, why = f"{frame.filename}:{frame.lineno}", str(error)
        if isinstance(error, SyntaxError):  # the frame is that of the import
            where, why = f"{error.filename}:{error.lineno}", error.msg
        text = f"can't import {module}: {type(error).__name__}: {why} ({where})"
        raise UsageError(text) from error


def _apps_of(module: Any) -> str:
    from timerclient.worker.timer_app import TimerApp

    apps = [name for name, value in vars(module).items() if isinstance(value, TimerApp)]
    return f"; its apps: {', '.join(apps)}" if apps else ""
