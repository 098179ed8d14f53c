"""Raft's messages between nodes: msgpack with checked types. Nothing is ever unpickled.

A message is a dict with the key `type` and the fields of SCHEMA. A record is (command, index,
term). The first byte of a command is its kind; only REGULAR and NO_OP are accepted. pysyncobj would
unpickle changes of membership and of code version, so these are refused. It would also split and
pickle records that are too large for one message, so these are refused, too.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, TypeAlias

import msgpack

from cluster.control.raft_journal import COMMAND_SIZE_MAX

REGULAR: Final = b"\0"
NO_OP: Final = b"\1"
MESSAGE_SIZE_MAX: Final = 1 << 20
TERM_STEP_MAX: Final = 1 << 32
"""A term may rise by this at once. Each election adds one, so no cluster needs as many."""
TERM_MAX: Final = 1 << 62
"""The highest term, so that there is always a next one."""

RaftMessage: TypeAlias = dict[str, Any]

SCHEMA: Final[Mapping[str, Mapping[str, tuple[type, ...]]]] = {
    "request_vote": {"term": (int,), "last_log_index": (int,), "last_log_term": (int,)},
    "response_vote": {"term": (int,)},
    "append_entries": {
        "term": (int,),
        "commit_index": (int,),
        "prevLogIdx?": (int, NoneType),
        "prevLogTerm?": (int, NoneType),
        "entries?": (tuple,),
        "serialized?": (tuple, NoneType),
    },
    "next_node_idx": {"next_node_idx": (int,), "reset": (bool,), "success": (bool,)},
    "apply_command": {"command": (bytes,), "request_id?": (int,)},
    "apply_command_response": {
        "request_id": (int,),
        "log_idx?": (int,),
        "log_term?": (int,),
        "error?": (int,),
    },
    "timeout_now": {"term": (int,)},
}
"""Fields by message type. A trailing "?" marks one that may be absent."""


class BadRaftMessage(Exception):
    """A peer sent a message that no peer of this version sends; its stream is ended."""


def encode(message: RaftMessage) -> bytes:
    """Return the wire form of a message that pysyncobj made."""
    data: bytes = msgpack.packb(message)
    return data


def decode(data: bytes) -> RaftMessage:
    """Return the message. It has all required fields with the right types, and no others.

    Raises:
        BadRaftMessage: it is not a message of SCHEMA.
    """
    message = unpack(data)
    if not isinstance(message, dict) or not isinstance(kind := message.get("type"), str):
        raise BadRaftMessage("not a message: no dict with a type")
    schema = SCHEMA.get(kind)
    if schema is None:
        raise BadRaftMessage(f"unknown type {kind!r}")
    _check_fields(kind, message, schema)
    match kind:
        case "append_entries":
            _check_append(message)
        case "apply_command":
            _check_command(message["command"], kinds=(REGULAR,))
        case "apply_command_response":
            if ("error" in message) == ("log_idx" in message and "log_term" in message):
                raise BadRaftMessage("an answer is either an error or a position")
        case _:
            pass
    return message


def check_term(message: RaftMessage, term: int) -> None:
    """Check that a node of `term` may take the message. At term 0 a node knows no term yet.

    Raises:
        BadRaftMessage: the message's term is too far above for elections to have led there.
    """
    limit = min(term + TERM_STEP_MAX, TERM_MAX) if term else TERM_MAX
    if message.get("term", 0) > limit:
        raise BadRaftMessage(f"{message['type']}.term = {message['term']}: must be at most {limit}")


def unpack(data: bytes) -> object:
    """Return the unpacked value, of msgpack's plain types only; sequences are tuples.

    Raises:
        BadRaftMessage: the data is not msgpack, or too large.
    """
    if len(data) > MESSAGE_SIZE_MAX:
        raise BadRaftMessage(f"{len(data)} bytes: must be at most {MESSAGE_SIZE_MAX}")
    try:
        unpacked: object = msgpack.unpackb(data, use_list=False)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise BadRaftMessage(f"not msgpack: {error}") from error
    return unpacked


def _check_fields(kind: str, message: RaftMessage, schema: Mapping[str, tuple[type, ...]]) -> None:
    allowed = {"type"}
    for field, types in schema.items():
        name = field.rstrip("?")
        allowed.add(name)
        if name not in message:
            if field == name:
                raise BadRaftMessage(f"{kind}.{name} is missing")
            continue
        value = message[name]
        # bool is a subclass of int, but not accepted as one. Raft's numbers are never negative.
        if type(value) not in types or (type(value) is int and not 0 <= value < 1 << 63):
            raise BadRaftMessage(f"{kind}.{name} = {value!r:.80}")
    if not message.keys() <= allowed:
        raise BadRaftMessage(f"{kind} with {sorted(map(str, message.keys() - allowed))}")


def _check_append(message: RaftMessage) -> None:
    if ("prevLogIdx" in message) == ("serialized" in message):
        raise BadRaftMessage("append_entries carries either records or a part of a snapshot")
    if "prevLogIdx" in message and not {"prevLogTerm", "entries"} <= message.keys():
        raise BadRaftMessage("append_entries without its records")
    # None: the record before is not in the sender's journal; pysyncobj then ignores the records.
    last_index, last_term = message.get("prevLogIdx"), message.get("prevLogTerm")
    if (last_index is None) != (last_term is None):
        raise BadRaftMessage(f"append_entries after {last_index}, term {last_term}")
    for entry in message.get("entries", ()):
        match entry:
            case (bytes(command), int(index), int(term)) if index > 0 and term >= 0:
                _check_command(command, kinds=(REGULAR, NO_OP))
            case _:
                raise BadRaftMessage(f"record {entry!r:.80}")
        if index != (index if last_index is None else last_index + 1):
            raise BadRaftMessage(f"record at index {index} after {last_index}")
        if not (last_term or 0) <= term <= message["term"]:
            raise BadRaftMessage(f"record of term {term}: must be {last_term} to {message['term']}")
        last_index, last_term = index, term
    match message.get("serialized"):
        case None | (bytes(), bool(), False) | (b"", False, True):  # the last part is empty
            pass
        case part:
            raise BadRaftMessage(f"part of a snapshot {part!r:.80}")


def _check_command(command: bytes, *, kinds: tuple[bytes, ...]) -> None:
    if command[:1] not in kinds or len(command) > COMMAND_SIZE_MAX:
        raise BadRaftMessage(f"command of {len(command)} bytes, kind {command[:1]!r}")
