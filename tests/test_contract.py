"""The contract timer.v1: names keep the rules of `buf lint`, and no change breaks a client.

`make proto-lint` runs buf itself. These tests need no buf. tests/data/timer.v1.binpb is the
contract of clients in use: later ones only add to it. `make proto-keep` writes it again.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from timer.entries import policies
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import prefix_of

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "tests/data/timer.v1.binpb"
SOURCE = ROOT / "timerclient/proto/timer/v1/timer.proto"
SAME_FIELDS = {
    "ScheduleRequest": ["ScheduleStreamRequest"],
    "ScheduleResponse": ["ScheduleStreamResponse"],
    "Deliveries": ["ReceiveResponse"],
    "AckResponse": ["NackResponse", "ExtendResponse"],
    "GroupStatus": ["CreateGroupResponse", "AlterGroupResponse", "SeekGroupResponse"],
    "ListMembersResponse": ["ChangeMembersResponse"],
    "DescribePoliciesResponse": ["AlterPoliciesResponse"],
}
"""A message -> answers that have its fields, which the code copies (as_type)."""


def present() -> FileDescriptorProto:
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    return file


def kept() -> FileDescriptorProto:
    [file] = FileDescriptorSet.FromString(KEPT.read_bytes()).file
    return file


def messages(
    within: FileDescriptorProto | DescriptorProto, path: str = ""
) -> Iterator[tuple[str, DescriptorProto]]:
    inner = within.message_type if isinstance(within, FileDescriptorProto) else within.nested_type
    for message in inner:
        name = f"{path}{message.name}"
        yield name, message
        yield from messages(message, f"{name}.")


def enums(file: FileDescriptorProto) -> Iterator[tuple[str, EnumDescriptorProto]]:
    yield from ((each.name, each) for each in file.enum_type)
    for name, message in messages(file):
        yield from ((f"{name}.{each.name}", each) for each in message.enum_type)


# ---- names


def misnamed(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the names that break a rule of buf's category STANDARD."""
    for name, enum in enums(file):
        prefix = prefix_of(enum.name)
        for value in enum.value:
            if not re.fullmatch(prefix + "[A-Z0-9]+(_[A-Z0-9]+)*", value.name):
                yield f"{name}: {value.name}"
        if enum.value[0].name != f"{prefix}UNSPECIFIED":
            yield f"{name}: {enum.value[0].name} = 0"
    for name, message in messages(file):
        if not re.fullmatch("([A-Z][a-z0-9]*)+", message.name):
            yield name
        parts: list[Any] = [*message.field, *message.oneof_decl]
        plain = re.compile("_?[a-z]+[a-z0-9]*(_[a-z0-9]+)*")  # `_name`: the oneof of an optional
        yield from (f"{name}.{each.name}" for each in parts if not plain.fullmatch(each.name))
    used: list[str] = []
    for service in file.service:
        if not service.name.endswith("Service"):
            yield service.name
        for rpc in service.method:
            for kind, suffix in ((rpc.input_type, "Request"), (rpc.output_type, "Response")):
                used.append(kind)
                if kind.rpartition(".")[2] not in (
                    f"{rpc.name}{suffix}",
                    f"{service.name}{rpc.name}{suffix}",
                ):
                    yield f"{service.name}.{rpc.name}: {kind}"
    yield from {f"several RPCs have {kind}" for kind in used if used.count(kind) > 1}


def test_names_keep_the_rules_of_buf_lint() -> None:
    assert [*misnamed(present())] == []


def test_the_file_lies_where_its_package_says() -> None:
    assert f"package {SOURCE.parent.parent.name}.{SOURCE.parent.name};\n" in SOURCE.read_text()


def test_answers_with_the_fields_of_another_message_have_all_of_them() -> None:
    by_name = dict(messages(present()))
    for name, answers in SAME_FIELDS.items():
        fields = {field.number: facts(field) for field in by_name[name].field}
        for answer in answers:
            found = {field.number: facts(field) for field in by_name[answer].field}
            assert found.items() >= fields.items(), answer


# ---- changes


def facts(field: FieldDescriptorProto) -> tuple[object, ...]:
    kind = field.type_name
    if kind.endswith("Entry"):  # of a map: its name has the message's name in it
        kind = kind.rpartition(".")[2]
    return field.name, kind, field.type, field.label, field.proto3_optional


def broken(old: FileDescriptorProto, new: FileDescriptorProto) -> list[str]:
    """Return the parts of `old` that `new` lacks or has changed."""
    found: list[str] = []

    def compare(name: str, before: dict[Any, Any], after: dict[Any, Any]) -> None:
        for key, fact in before.items():
            if after.get(key) != fact:
                found.append(f"{name} {key}: {fact} -> {after.get(key)}")

    def places(message: DescriptorProto) -> dict[int, tuple[object, ...]]:
        names = [each.name for each in message.oneof_decl]
        return {
            field.number: (
                *facts(field),
                names[field.oneof_index] if field.HasField("oneof_index") else "",
            )
            for field in message.field
        }

    now = dict(messages(new))
    for name, message in messages(old):
        compare(name, places(message), places(now.get(name, DescriptorProto())))
    values = {name: {v.number: v.name for v in enum.value} for name, enum in enums(new)}
    for name, enum in enums(old):
        compare(name, {v.number: v.name for v in enum.value}, values.get(name, {}))
    compare("rpc", rpcs(old), rpcs(new))
    return found


def rpcs(file: FileDescriptorProto) -> dict[str, tuple[object, ...]]:
    return {
        f"{service.name}.{rpc.name}": (
            rpc.input_type,
            rpc.output_type,
            rpc.client_streaming,
            rpc.server_streaming,
        )
        for service in file.service
        for rpc in service.method
    }


def test_clients_of_the_kept_contract_understand_the_present_one() -> None:
    assert broken(kept(), present()) == [], "a change breaks clients; additions are possible"


def test_fields_of_policies_are_those_of_the_node() -> None:
    assert tuple(field.name for field in of(present(), "Policy").field) == policies.FIELDS


def test_new_fields_of_policies_wait_for_a_feature_level() -> None:
    known = {field.name for field in of(kept(), "Policy").field}
    why = "a node of the last release can't apply a POLICY entry with such a field"
    assert {*policies.FIELDS} - known <= {*policies.FIELDS_OF_LEVEL_2}, why


def of(file: FileDescriptorProto, name: str) -> Any:
    return next(each for each in file.message_type if each.name == name)


CHANGES: dict[str, Callable[[FileDescriptorProto], object]] = {
    "removed field": lambda file: of(file, "Error").field.pop(),
    "other number": lambda file: setattr(of(file, "Error").field[0], "number", 99),
    "other type": lambda file: setattr(of(file, "Error").field[1], "type", 12),
    "other label": lambda file: setattr(of(file, "Error").field[1], "label", 3),
    "no presence": lambda file: of(file, "Policy").field[0].ClearField("proto3_optional"),
    "other oneof": lambda file: of(file, "SeekGroupRequest").field[2].ClearField("oneof_index"),
    "removed message": lambda file: file.message_type.pop(),
    "other value": lambda file: setattr(file.enum_type[0].value[1], "name", "REASON_X"),
    "removed value": lambda file: file.enum_type[0].value.pop(),
    "removed rpc": lambda file: file.service[0].method.pop(),
    "streamed answer": lambda file: setattr(file.service[0].method[0], "server_streaming", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_that_break_clients_are_found(
    change: Callable[[FileDescriptorProto], object],
) -> None:
    file = kept()
    change(file)
    assert broken(kept(), file)
    file = kept()
    file.message_type.add(name="New")
    of(file, "Error").field.add(name="more", number=99, type=9, label=1)
    assert broken(kept(), file) == []
