"""The audit log has the targets of every change, and no false OK."""

import asyncio
import errno
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.rpc.audit_log import (
    DENIED_EACH_MAX,
    POLLED_EVERY_S,
    REQUEST_BYTES_MAX,
    AuditLog,
    audit,
    request_for_log,
)
from cluster.rpc.call_guard import CallGuard
from cluster.rpc.rpc_caller import Caller
from cluster.security.access_rules import parse_rules
from cluster.security.identities import CallerIdentity, IdentityKind
from cluster.security.method_rules import METHOD_RULES
from deploy.certificate_store import CertificateStore
from timer.model.timer_errors import ConfigError, NotReadyError, PermissionDeniedError
from timerclient.proto import timer_pb2 as pb

DELETE = "/timer.v1.AdminService/DeleteTopic"
UNKNOWN_FIELD = b"\xfa\x7f\xa0\x1f" + bytes(4_000)  # field 2047, 4,000 bytes


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """The file of the audit log, which the test opens."""
    path = tmp_path / "audit.log"
    yield path
    for handler in audit.handlers[:]:
        audit.removeHandler(handler)
        handler.close()
    audit.propagate = True
    audit.setLevel(logging.NOTSET)


def test_line_that_fails_is_in_the_log_of_the_node(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"audit_log = .*Not a directory"):
        AuditLog("n1", f"{__file__}/audit.log")
    caller: Any = SimpleNamespace(identity="admin/a", address="x", method="/s/M", log_index=0)
    audit.handlers[:] = []
    log = AuditLog("n1", str(file))
    file.unlink()
    file.mkdir()
    log.record_change(caller, {}, "OK")
    assert log.complaints() == [
        f"the audit log can't be written: [Errno 21] Is a directory: '{file}'"
    ]
    [record] = caplog.records
    assert record.getMessage() == "the audit log can't be written"
    assert json.loads(record.line)["method"] == "M"  # type: ignore[attr-defined]
    file.rmdir()
    log.record_change(caller, {}, "OK")
    assert log.complaints() == []


def test_line_that_a_full_disk_cuts_does_not_damage_the_next_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller: Any = SimpleNamespace(identity="admin/a", address="x", method="/s/M", log_index=0)
    log = AuditLog("n1", str(file))
    real, room = os.write, [0]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "planted")
        written = real(descriptor, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        for room[0] in 20, 0:
            log.record_change(caller, {}, "CUT")
            assert log.complaints() == ["the audit log can't be written: [Errno 28] planted"]
    log.record_change(caller, {}, "OK")
    cut, line = file.read_text().splitlines()
    assert (len(cut), json.loads(line)["result"]) == (20, "OK")
    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        room[0] = 20
        log.record_change(caller, {}, "CUT")
    file.unlink()
    log.record_change(caller, {}, "OK")
    assert file.read_text()[0] == "{"


def test_file_that_takes_no_lines_does_not_hold_the_node(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(file)
    caller: Any = SimpleNamespace(identity="admin/a", address="x", method="/s/M", log_index=0)
    begun_s = time.monotonic()
    log = AuditLog("n1", str(file))
    hangs = [f"the audit log can't be written: '{file}' takes no lines"]
    assert log.complaints() == hangs
    for _ in range(100):
        log.record_change(caller, {}, "OK")
    assert time.monotonic() < begun_s + 5
    assert log.complaints() == hangs
    errors = [record.error for record in caplog.records]  # type: ignore[attr-defined]
    assert errors == [f"'{file}' takes no lines"] * 100
    with file.open() as reader:
        [handler] = audit.handlers
        handler._last.result(60)  # type: ignore[attr-defined]
        assert log.complaints() == []
        log.record_change(caller, {}, "NOT_FOUND")
        assert json.loads(reader.readline())["result"] == "NOT_FOUND"


def test_long_request_is_logged_with_its_targets() -> None:
    settings = pb.GroupSettings(dead_letter_topic="d" * REQUEST_BYTES_MAX)
    request = pb.AlterGroupRequest(topic="t" * 4_096, group="g", settings=settings)
    line: Any = request_for_log(request)
    assert line == {"topic": "t" * 512, "group": "g", "size": f"{request.ByteSize()} bytes"}
    scope = pb.PolicyScope(topic="orders", namespace="x" * REQUEST_BYTES_MAX)
    line = request_for_log(pb.AlterPoliciesRequest(scope=scope))
    assert line["topic"] == "orders"


def test_unknown_fields_hide_no_request() -> None:
    request = pb.DeleteTopicRequest.FromString(
        pb.DeleteTopicRequest(topic="orders").SerializeToString() + 2 * UNKNOWN_FIELD
    )
    assert request.ByteSize() > REQUEST_BYTES_MAX
    assert request_for_log(request) == {"topic": "orders"}


async def test_call_that_fails_is_not_logged_as_ok_and_only_the_owner_reads_the_log(
    file: Path, tmp_path: Path
) -> None:
    store = CertificateStore(tmp_path / "certs")
    store.create("c")
    pem = store.path("ca").read_bytes()
    context: Any = SimpleNamespace(auth_context=lambda: {"x509_pem_cert": [pem]})
    identity = CallerIdentity(IdentityKind.ADMIN, "a")
    rules = parse_rules('[[rule]]\nwho = ["admin/a"]\nmay = ["manage"]')
    usages: Any = SimpleNamespace(open_call=lambda *_: nullcontext())
    caller = Caller(
        identity, DELETE, METHOD_RULES[DELETE], lambda: rules, "ipv4:127.0.0.1:1", usages
    )

    class Open:
        def admit(self, method: str, context: object) -> Caller:
            return caller

        def claimed_identity(self, context: object) -> str:
            return "admin/a"

    access: Any = type("Access", (), {"on_change": []})
    guard = CallGuard(Open(), access, AuditLog("n1", str(file)))
    with pytest.raises(ZeroDivisionError), guard._admission(DELETE, object(), context):
        _ = 1 / 0
    with guard._admission(DELETE, object(), context):
        pass
    caller.note(3, 7)
    caller.note(3, 0)
    with pytest.raises(asyncio.CancelledError), guard._admission(DELETE, object(), context):
        raise asyncio.CancelledError
    assert results_and_mode(file) == (["UNKNOWN", "OK", "CANCELLED"], 0o600)
    caller.note(3, 8)
    caller.on_late(caller, None)
    caller.on_late(caller, NotReadyError("the epoch ended"))
    late = [(each["result"], each["late"], each["log_index"]) for each in lines_of(file)[3:]]
    assert late == [("OK", True, 8), ("UNAVAILABLE", True, 8)]
    outcomes = [
        (line.get("outcome"), line.get("epoch"), line.get("log_index"))
        for line in lines_of(file)[:3]
    ]
    assert outcomes == [("unknown", None, None), (None, None, None), ("unknown", 3, 7)]


def results_and_mode(file: Path) -> tuple[list[str], int]:
    results = [json.loads(line)["result"] for line in file.read_text().splitlines()]
    return results, stat.S_IMODE(file.stat().st_mode)


async def test_polled_method_has_one_line_an_hour_for_each_caller(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, now_s = AuditLog("n1", str(file)), [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def called(name: str) -> bool:
        identity = CallerIdentity(IdentityKind.ADMIN, name)
        nothing: Any = None
        path = "/timer.v1.AdminService/FetchLog"
        return log.has_line(Caller(identity, path, METHOD_RULES[path], nothing, "", nothing))

    assert [called("a"), called("b"), called("a"), called("b")] == [True, True, False, False]
    now_s[0] += POLLED_EVERY_S - 1
    assert not called("a")
    now_s[0] += 1
    assert [called("a"), called("a")] == [True, False]


async def test_flood_of_denied_calls_is_cut_and_counted_and_the_file_may_be_moved(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, calls = AuditLog("n1", str(file)), list[Callable[[], None]]()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda _, work: calls.append(work))
    error = PermissionDeniedError("no rule")
    for each in range(1_000):
        log.record_denial(DELETE, f"client/{each % 2}", "ipv4:127.0.0.1:1", error)
    moved = lines_of(file)
    assert len(moved) == 2 * DENIED_EACH_MAX
    move_away(file)
    (end,) = calls
    end()
    assert [line["left_out"] for line in lines_of(file)] == [1_000 - len(moved)]
    log.record_denial(DELETE, "client/0", "ipv4:127.0.0.1:1", error)
    assert len(lines_of(file)) == 2
    for port in range(100):  # callers without an identity, from one address
        log.record_denial(DELETE, "", f"ipv4:127.0.0.2:{port}", error)
    log.record_denial(DELETE, "", "ipv4:127.0.0.3:1", error)
    assert len(lines_of(file)) == 2 + DENIED_EACH_MAX + 1, "another address has lines of its own"


def lines_of(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def move_away(file: Path) -> None:
    file.rename(file.with_suffix(".1"))
