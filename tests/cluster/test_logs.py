"""Every log record is one line that a program can parse."""

import asyncio
import errno
import json
import logging
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from cluster.rpc.handlers import NO_HOOKS, _RpcMeasurement
from cluster.settings.log_format import DEFAULT, LineFormatter, set_level, setup_logs
from cluster.settings.log_writer import WAITING_MAX
from tests.cluster.running import full_pipe
from timer.model.timer_errors import InvalidRequestError, NotFoundError


class Written:
    """A log file, and its text so far."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def getvalue(self) -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        return self._path.read_text()


@pytest.fixture
def restored() -> Iterator[None]:
    """Undo a setup of the logs afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(capture=False)
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """The descriptor of a log file."""
    with (tmp_path / "log").open("wb") as file:
        yield file.fileno()


@pytest.fixture
def stream(restored: None, file: int, tmp_path: Path) -> Written:
    """The process's log output at level info; the setup is undone afterwards."""
    setup_logs(level="info", node="n1", descriptor=file)
    return Written(tmp_path / "log")


def test_line_has_time_level_node_logger_message_and_fields(stream: Written) -> None:
    logging.getLogger("cluster.node.node").info(
        "leader since %d ms", 4, extra={"epoch": 7, "why": ""}
    )
    fields = dict(each.split("=", 1) for each in shlex.split(stream.getvalue()))
    assert fields.pop("time")[10:11] == "T"
    assert fields == {
        "level": "info",
        "node": "n1",
        "logger": "cluster.node.node",
        "msg": "leader since 4 ms",
        "epoch": "7",
        "why": "",
    }


def test_time_is_utc_with_milliseconds() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "m", None, None)
    record.created, record.msecs = 1_700_000_000.0429, 42.9
    line = LineFormatter("n1").format(record)
    assert line.startswith("time=2023-11-14T22:13:20.042Z level=info ")


def test_whatever_is_logged_stays_one_line(stream: Written) -> None:
    logger = logging.getLogger("a")
    try:
        int("first\nsecond")
    except ValueError:
        logger.exception("caught\nhere", extra={"name_": 'x" level=error\r\n'})
    logger.info("with stack\u2028", stack_info=True)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].isascii()
    assert r'name_="x\" level=error\r\n" exc="Traceback' in lines[0]
    assert lines[0].index("Traceback") < lines[0].index("second")
    assert "stack=" in lines[1]


def test_level_is_the_least_that_is_logged(stream: Written) -> None:
    logging.getLogger("a").debug("hidden")
    assert stream.getvalue() == ""


def test_debug_lines_of_grpc_are_left_out(stream: Written) -> None:
    logging.getLogger().setLevel("DEBUG")
    for name in ("grpc._cython.cygrpc", "a"):
        logging.getLogger(name).debug("of %s", name)
    assert stream.getvalue().count("level=debug") == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError(), DecodeError("no protobuf")])
def test_a_peers_fault_that_grpc_logs_as_an_error_is_one_line_of_information(
    stream: Written, error: BaseException
) -> None:
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    grpc_log.error("not handled in [/Peer/Link]", exc_info=(type(error), error, None))
    assert "level=info" in stream.getvalue()
    assert "exc=" not in stream.getvalue()
    assert f"[/Peer/Link]: {error}" in stream.getvalue()


def test_warnings_of_python_are_logged(stream: Written) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "logger=py.warnings" in stream.getvalue()


@pytest.mark.usefixtures("restored")
def test_logs_go_to_stderr_unless_told(capfd: pytest.CaptureFixture[str]) -> None:
    handler = setup_logs(level="error", node="n2")
    assert logging.getLogger().handlers == [handler]
    logging.getLogger("a").error("told")
    handler.flush()
    assert "msg=told" in capfd.readouterr().err


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.usefixtures("restored")
def test_full_pipe_delays_no_caller_and_the_next_line_has_the_number_of_lines_left_out(
    blocks: bool,
) -> None:
    with full_pipe() as (read, write):
        os.set_blocking(write, blocks)
        handler = setup_logs(level="info", node="n1", descriptor=write)
        handler.filters.clear()
        logger, changing = logging.getLogger("a"), ["as it was"]
        for _ in range(3 * WAITING_MAX):  # one part may be with the thread, one waits
            logger.info("%s", changing)
        changing[0] = "changed"
        logger.critical("last", extra={"left_out": 5})  # by the rate limit
        logger.critical("next")
        written, line = 0, b""
        with open(read, "rb", closefd=False) as pipe:
            while b"msg=last" not in line:
                written += b"as it was" in line
                line = pipe.readline()
            assert b"left_out" not in pipe.readline()
        left_out = int(line.split(b"left_out=")[1])
        assert written >= WAITING_MAX
        assert written + left_out == 3 * WAITING_MAX + 5


def test_line_that_a_full_disk_has_in_part_is_not_joined_with_the_next_one(
    stream: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 100

    def write(descriptor: int, text: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "no room")
        size = write(descriptor, text[:room])
        room -= size
        return size

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        for _ in range(9):
            logging.getLogger("a").info("during")
        assert len(stream.getvalue()) == 100
    for _ in range(2):
        logging.getLogger("a").info("after")
    assert [line.count("time=") for line in stream.getvalue().splitlines()] == [1, 1, 1, 1]


def test_json_has_the_same_fields_and_stays_one_line_of_valid_json(
    stream: Written, file: int
) -> None:
    setup_logs(level="info", node="n1", form="json", descriptor=file)
    extra = {"epoch": 7, "late_s": float("nan"), "on": True, "peers": ["a"], "why": 'x"\n\ud800'}
    logging.getLogger("a").info("led %d", 4, extra=extra)
    [line] = stream.getvalue().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert list(found)[:5] == ["time", "level", "node", "logger", "msg"]
    assert found | {"time": ""} == {
        "time": "",
        "level": "info",
        "node": "n1",
        "logger": "a",
        "msg": "led 4",
        "epoch": 7,
        "late_s": "nan",
        "on": True,
        "peers": "['a']",
        "why": 'x"\n\ud800',
    }


def test_level_of_one_logger_is_set_and_follows_its_package_again(stream: Written) -> None:
    logger = logging.getLogger("pack.module")
    assert set_level("pack", "debug") == "info"
    logger.debug("one")
    assert set_level("pack.module", "error") == "debug"
    logger.warning("two")
    assert set_level("pack.module", DEFAULT) == "error"
    assert set_level("pack", DEFAULT) == "debug"
    logger.debug("three")
    assert set_level("", "warning") == "info"
    logger.info("four")
    messages = [line for line in stream.getvalue().splitlines() if "logger=pack" in line]
    assert len(messages) == 1
    assert "msg=one" in messages[0]


@pytest.mark.parametrize(
    ("logger", "level", "error"),
    [
        ("", "loud", InvalidRequestError),
        ("", DEFAULT, InvalidRequestError),
        ("cluster", "", InvalidRequestError),
        ("cluster.audit", "error", InvalidRequestError),
        ("no.such.logger", "debug", NotFoundError),
    ],
)
def test_wrong_levels_and_loggers_are_rejected(
    logger: str, level: str, error: type[Exception]
) -> None:
    known = len(logging.root.manager.loggerDict)
    with pytest.raises(error):
        set_level(logger, level)
    assert len(logging.root.manager.loggerDict) == known, "no logger is made"


def test_level_debug_has_a_line_for_each_call(stream: Written) -> None:
    context: Any = SimpleNamespace(peer=lambda: "ipv4:10.0.0.9:1")
    for level in ("INFO", "DEBUG"):
        logging.getLogger().setLevel(level)
        with _RpcMeasurement(NO_HOOKS, "Ack", object(), context):
            pass
    [line] = stream.getvalue().splitlines()
    assert re.search(r"msg=RPC method=Ack code=OK ms=\S+ relayed=no peer=ipv4:10.0.0.9:1$", line)
