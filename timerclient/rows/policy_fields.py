"""Policies: scopes and values of fields, from an application's arguments to the contract."""

from collections.abc import Mapping
from typing import Any

from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.values.errors import InvalidRequest
from timerclient.values.policy_names import FIELDS, FLAGS, LEVELS, TEXTS


def scope(namespace: str | None = None, topic: str | None = None) -> pb.PolicyScope:
    """Return the scope of a namespace or a topic; without either, of the cluster.

    Raises:
        InvalidRequest: A name is empty or not a string. An empty name is not the cluster: it is
            probably a mistake.
    """
    for field, name in (("namespace", namespace), ("topic", topic)):
        if name is not None and not rows.utf8(field, name):
            limit = "must not be empty; for the cluster, give neither namespace nor topic"
            raise InvalidRequest.of(field, name, limit)
    return pb.PolicyScope(namespace=namespace or "", topic=topic or "")


def change_scope(namespace: str | None, topic: str | None, *, cluster: bool) -> pb.PolicyScope:
    """Return the scope of a change; exactly one of the three is given.

    Raises:
        InvalidRequest: None or several are given, or a name is empty or not a string.
    """
    given = [topic is not None, namespace is not None, cluster].count(True)
    if given != 1:
        limit = "give exactly one of topic=, namespace= and cluster=True"
        raise InvalidRequest.of("scope", None, limit)
    return scope(namespace, topic)


def policy_of(fields: Mapping[str, Any]) -> pb.Policy:
    """Return a Policy with `fields`; `delay_levels_ms` is a sequence of delays.

    Raises:
        InvalidRequest: There is no such field, or the value is of the wrong type or out of range.
    """
    out = pb.Policy()
    for name, value in fields.items():
        if name not in FIELDS:
            raise InvalidRequest.of("policy", name, f"must be one of {', '.join(FIELDS)}")
        if isinstance(value, bool) != (name in FLAGS):
            limit = "must be a string" if name in TEXTS else "must be a number"
            limit = "must be true or false" if name in FLAGS else limit
            raise InvalidRequest.of(name, value, limit)
        if name == LEVELS:
            out.delay_levels_ms.CopyFrom(_levels(value))
        else:
            rows.set_field(out, name, value)
    return out


def _levels(value: Any) -> pb.DelayLevels:
    try:
        return pb.DelayLevels(ms=value)
    except (TypeError, ValueError):
        limit = f"must be delays in ms, each 1 to {rows.DUE_MS_MAX}"
        raise InvalidRequest.of(LEVELS, value, limit) from None


def fields_of(message: pb.Policy) -> dict[str, Any]:
    """Return the fields that are set; the inverse of `policy_of`."""
    found = {field.name: value for field, value in message.ListFields()}
    if LEVELS in found:
        found[LEVELS] = [*found[LEVELS].ms]
    return found
