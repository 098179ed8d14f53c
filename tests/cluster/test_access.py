"""Rules of access: their file, and the table of the methods' needs."""

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cluster.security.access_rules import CLUSTER, AccessTarget, Permission, parse_rules
from cluster.security.identities import CallerIdentity, IdentityKind
from cluster.security.method_rules import METHOD_RULES
from timer.model.timer_errors import ConfigError
from timerclient.proto import timer_pb2 as pb

RULES = """
[[rule]]
who = ["client/billing", "client/test-*"]
may = ["produce", "consume"]
topics = ["payments/*", "orders"]
groups = ["billing*"]

[[rule]]
who = ["admin/*"]
may = ["manage", "observe"]
"""
BILLING = CallerIdentity(IdentityKind.CLIENT, "billing")
ALICE = CallerIdentity(IdentityKind.ADMIN, "alice")


@pytest.mark.parametrize(
    ("permission", "target", "allowed"),
    [
        (Permission.PRODUCE, AccessTarget("payments/a"), True),
        (Permission.PRODUCE, AccessTarget("orders"), True),
        (Permission.PRODUCE, AccessTarget("default/orders"), True),
        (Permission.PRODUCE, AccessTarget("orders2"), False),
        (Permission.PRODUCE, AccessTarget("x/orders"), False),
        (Permission.PRODUCE, CLUSTER, False),
        (Permission.CONSUME, AccessTarget("orders", "billing-2"), True),
        (Permission.CONSUME, AccessTarget("orders", "audit"), False),
        (Permission.CANCEL, AccessTarget("orders"), False),
    ],
)
def test_a_rule_covers_its_topics_and_groups(
    permission: Permission, target: AccessTarget, *, allowed: bool
) -> None:
    rules = parse_rules(RULES)
    assert rules.may(BILLING, permission, target) is allowed
    assert rules.may(CallerIdentity(IdentityKind.CLIENT, "test-1"), permission, target) is allowed
    for other in (
        CallerIdentity(IdentityKind.ADMIN, "billing"),
        CallerIdentity(IdentityKind.CLIENT, "other"),
    ):
        assert not rules.may(other, permission, target)


def test_a_rule_without_topics_covers_the_cluster() -> None:
    rules = parse_rules(RULES)
    assert rules.may(ALICE, Permission.OBSERVE, CLUSTER)
    assert not rules.may_some(ALICE, Permission.OPERATE)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[rule]", "not TOML"),
        ("x = " + "[" * 20_000, "not TOML"),
        ("", "at least one table"),
        ('rule = ["admin/*"]', "a table"),
        ("x = 1", "unknown"),
        ("[rule]\nwho = []", "tables"),
        ('[[rule]]\nwho = ["client/a"]', "rule 1: may"),
        ('[[rule]]\nmay = ["produce"]', "rule 1: who"),
        ('[[rule]]\nwho = ["client/a"]\nmay = ["all"]', "one of produce, cancel"),
        ('[[rule]]\nwho = ["node/n1"]\nmay = ["operate"]', "client/NAME or admin/NAME"),
        ('[[rule]]\nwho = "client/a"\nmay = ["produce"]', "a list of texts"),
        ('[[rule]]\nwho = ["client/a"]\nmay = ["produce"]\ntopic = ["a"]', "rule 1 = 'topic'"),
    ],
)
def test_a_malformed_rule_is_rejected_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_rules(text)


def test_each_method_has_a_line() -> None:
    services = [*pb.DESCRIPTOR.services_by_name.values()]
    services += health_pb2.DESCRIPTOR.services_by_name.values()
    services += reflection_pb2.DESCRIPTOR.services_by_name.values()
    served = {f"/{each.full_name}/{m.name}" for each in services for m in each.methods}
    assert METHOD_RULES.keys() == served
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            request = getattr(pb, method.input_type.name)()
            list(METHOD_RULES[f"/{service.full_name}/{method.name}"].targets(request))
