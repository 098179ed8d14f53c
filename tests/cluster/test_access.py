"""Rules of access: their file, and the table of the methods' needs."""

from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cluster.api.series_desk import SeriesDesk
from cluster.api.topic_filter import NAMES_AT_ONCE, filter_of_caller
from cluster.api.wire_rows import RequestLimits
from cluster.rpc.access_file import AccessFile
from cluster.rpc.relay import PATHS
from cluster.rpc.rpc_caller import CALLER, Caller
from cluster.security import access_rules
from cluster.security.access_rules import (
    CLUSTER,
    RULES_MAX,
    AccessRule,
    AccessTarget,
    Permission,
    parse_rules,
)
from cluster.security.identities import CallerIdentity, IdentityKind
from cluster.security.method_rules import CONTRACT_RULES, METHOD_RULES, Repeat
from timer.model.timer_errors import ConfigError, PermissionDeniedError
from timer.model.units import MonoMs, Now, UnixMs
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


@pytest.mark.parametrize(
    ("pattern", "covered", "others"),
    [
        ("o*", ["o", "orders", "default/o"], ["other/x", "o/x", "default/o/x", "o/", "default/"]),
        ("ns/*", ["ns/x", "ns/x/y", "default/ns/x", "ns/"], ["ns", "ns2/x", "default/"]),
        ("default/*", ["x", "default/x", "default/"], ["ns/x", "default/ns/x", "ns/"]),
        ("ns/x*", ["ns/x", "ns/x/y"], ["ns/", "ns/y", "x"]),
        ("*/*", ["x", "ns/x"], ["ns/", "default/"]),
        ("*", ["x", "ns/x", "ns/", "default/"], []),
    ],
)
def test_a_pattern_of_topics_is_matched_by_namespace_and_by_name(
    pattern: str, covered: list[str], others: list[str]
) -> None:
    rule = AccessRule(who=(), may=(), topics=(pattern,))
    assert [each for each in covered + others if rule.covers(AccessTarget(each))] == covered
    assert rule.covers(CLUSTER) == (pattern == "*")


def targets_of(method: str, request: object) -> list[AccessTarget]:
    return [*METHOD_RULES[f"/timer.v1.AdminService/{method}"].targets(request)]


@pytest.mark.parametrize("method", ["CreateGroup", "AlterGroup"])
def test_the_topic_of_a_groups_dead_letters_is_a_target_if_it_is_the_default_one(
    method: str,
) -> None:
    request = getattr(pb, f"{method}Request")(topic="t", group="g")
    group = AccessTarget("t", "g")
    assert targets_of(method, request) == [group, AccessTarget("t.g.dead")]
    request.settings.dead_letter_topic = "lost"
    assert targets_of(method, request) == [group, AccessTarget("lost")]


def test_the_topic_of_a_counts_filter_is_its_target() -> None:
    rule = METHOD_RULES["/timer.v1.TimerService/CountTimers"]
    assert [*rule.targets(pb.CountTimersRequest(topic="t"))] == [AccessTarget("t")]
    request = pb.CountTimersRequest(topic="t", filter=pb.TimerFilter(topic="of-others"))
    assert [*rule.targets(request)] == [AccessTarget("of-others")]


def test_a_rule_for_some_groups_allows_no_act_on_all_of_them() -> None:
    policies = [pb.PolicyScope(topic="t"), pb.PolicyScope(namespace="ns"), pb.PolicyScope()]
    targets = targets_of("DeleteTopic", pb.DeleteTopicRequest(topic="t"))
    for scope in policies:
        targets += targets_of("AlterPolicies", pb.AlterPoliciesRequest(scope=scope))
    assert len(targets) == 4
    some = AccessRule(who=(), may=(), groups=("g*",))
    assert [each for each in targets if some.covers(each)] == []
    assert some.covers(AccessTarget("t"))
    assert all(AccessRule(who=(), may=()).covers(each) for each in targets)


def test_a_check_compares_its_caller_with_no_rules_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_all = '[[rule]]\nwho = ["client/*"]\nmay = ["observe"]\nrate = { requests = 700 }\n'
    rules = parse_rules(
        of_all
        + "".join(
            f'[[rule]]\nwho = ["client/t{n}"]\nmay = ["produce", "consume"]\ntopics = ["t{n}/*"]\n'
            f"rate = {{ requests = {n + 1} }}\n"
            for n in range(RULES_MAX - 1)
        )
    )
    compared = list[str]()

    def noted(text: str, pattern: str) -> bool:
        compared.append(pattern)
        return fnmatchcase(text, pattern)

    monkeypatch.setattr(access_rules, "fnmatchcase", noted)
    for n in range(RULES_MAX - 1):
        caller = CallerIdentity(IdentityKind.CLIENT, f"t{n}")
        for each in (Permission.PRODUCE, Permission.CONSUME):
            assert rules.may(caller, each, AccessTarget(f"t{n}/a"))
            assert not rules.may(caller, each, AccessTarget(f"t{n + 1}/a"))
        assert rules.may_some(caller, Permission.OBSERVE)
        assert not rules.may_some(caller, Permission.CANCEL)
        assert rules.limits(caller).requests == min(n + 1, 700)
    assert len(compared) <= 8 * RULES_MAX


def test_a_rule_without_topics_covers_the_cluster() -> None:
    rules = parse_rules(RULES)
    assert rules.may(ALICE, Permission.OBSERVE, CLUSTER)
    assert not rules.may_some(ALICE, Permission.OPERATE)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[rule]", "must be TOML"),
        ("x = " + "[" * 20_000, "must be TOML"),
        ("", "at least one table"),
        ('rule = ["admin/*"]', "a table"),
        ("x = 1", "unknown"),
        ("[rule]\nwho = []", "tables"),
        ('[[rule]]\nwho = ["client/a"]', "rule 1: may"),
        ('[[rule]]\nmay = ["produce"]', "rule 1: who"),
        ('[[rule]]\nwho = ["client/a"]\nmay = ["all"]', "one of produce, cancel"),
        ('[[rule]]\nwho = ["node/n1"]\nmay = ["operate"]', "client/NAME, admin/NAME or token/NAME"),
        ('[[rule]]\nwho = ["client/?"]\nmay = ["produce"]', "the only wildcard"),
        ('[[rule]]\nwho = ["client/a"]\nmay = ["produce"]\ntopics = ["[ab]"]', "rule 1: topics"),
        ('[[rule]]\nwho = "client/a"\nmay = ["produce"]', "a list of strings"),
        ('[[rule]]\nwho = ["client/a"]\nmay = ["produce"]\ntopic = ["a"]', "rule 1 = 'topic'"),
    ],
)
def test_a_malformed_rule_is_rejected_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_rules(text)


def test_error_of_a_malformed_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text("[[rule]")
    with pytest.raises(ConfigError, match=rf"tls.access = '{path}': .*must be TOML"):
        AccessFile(str(path))


@pytest.mark.parametrize(
    "method",
    [
        *("DrainNode", "SetLogLevel", "DumpStacks", "TraceHops", "ReloadFiles"),
        "BeginVerification",
    ],
)
def test_a_call_to_a_single_node_needs_operate(method: str) -> None:
    assert METHOD_RULES[f"/timer.v1.AdminService/{method}"].permission is Permission.OPERATE


async def test_a_series_is_altered_by_its_creation_only_with_the_permission_of_a_change() -> None:
    method = "/timer.v1.TimerService/CreateSeries"
    rules, unused = parse_rules(RULES), cast("Any", None)
    host: Any = SimpleNamespace(require_leader=lambda: None, now=lambda: Now(MonoMs(0), UnixMs(0)))
    limits = RequestLimits(
        key_bytes_max=100, headers_bytes_max=100, request_rows_max=100, request_bytes_max=1_000
    )
    desk = SeriesDesk(host, unused, unused, limits, salt=0)
    request = pb.CreateSeriesRequest(topic="orders", key="k", alter=True)
    request.fields.every_ms = 1_000
    token = CALLER.set(Caller(BILLING, method, METHOD_RULES[method], lambda: rules, "", unused))
    with pytest.raises(PermissionDeniedError, match="no rule for cancel on 'orders'"):
        await desk.create(request)
    CALLER.reset(token)


def test_a_denied_call_about_all_topics_says_so() -> None:
    method = "/timer.v1.AdminService/ListProducers"
    rules = parse_rules(RULES.replace('"consume"]', '"consume", "observe"]'))
    unused: Any = None
    caller = Caller(BILLING, method, METHOD_RULES[method], lambda: rules, "", unused)
    with pytest.raises(PermissionDeniedError, match="no rule for observe on all topics and groups"):
        caller.check_target(CLUSTER)


@pytest.mark.parametrize(
    "patterns",
    [
        *(["*"], ["o*"], ["*o*", "orders"], ["default/*"], ["default/o*", "o*"], ["none"]),
        *(["pay/*"], ["pay/a*", "pay/*", "orders"], ["p*/*b"], ["d*/o*"], ["*/*"]),
    ],
)
async def test_a_list_has_all_topics_of_the_rules_and_no_other_page_by_page(
    patterns: list[str],
) -> None:
    # Groups are limited, because else "*" stands for the whole cluster, too.
    rules = parse_rules(
        f'[[rule]]\nwho = ["client/*"]\nmay = ["observe"]\ngroups = ["g"]\ntopics = {patterns}\n'
    )
    method, unused = "/timer.v1.AdminService/ListTopics", cast("Any", None)
    caller = Caller(BILLING, method, METHOD_RULES[method], lambda: rules, "", unused)
    names = ["default", "o", "o/a", "orders", "orders/b", "pay", "pay/a", "pay/ab", "pay/b", "q/o"]
    names = sorted([*names, *(f"m/{n}" for n in range(NAMES_AT_ONCE))])
    token = CALLER.set(caller)
    shown = filter_of_caller()
    CALLER.reset(token)
    assert shown is not None
    mine = [name for name in names if caller.allows(AccessTarget(name))]
    assert await shown.after(names, "", len(names)) == mine
    for after in ("", "a", "o", "o/", "pay/a", "z"):
        rest = [name for name in mine if name > after]
        assert await shown.after(names, after, 2) == rest[:2]


def test_each_method_has_a_line() -> None:
    services = [*pb.DESCRIPTOR.services_by_name.values()]
    services += health_pb2.DESCRIPTOR.services_by_name.values()
    services += reflection_pb2.DESCRIPTOR.services_by_name.values()
    served = {f"/{each.full_name}/{m.name}" for each in services for m in each.methods}
    served.add("/grpc.health.v1.Health/List")  # of grpcio-health-checking from 1.85 on
    assert METHOD_RULES.keys() == served
    assert CONTRACT_RULES.keys() == PATHS.keys()
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            request = getattr(pb, method.input_type.name)()
            list(METHOD_RULES[f"/{service.full_name}/{method.name}"].targets(request))


PROPERTIES = {
    "hides_target": "CountTimers DescribePolicies GetSeries GetTimer ListSeries ListTimers"
    " ListTopics Peek ReadMessages",
    "answers_each": "ScheduleStream",
    "paced": "Consume",
    "is_step": "FetchBackup TraceHops",
    "is_polled": "FetchLog",
    "here": "BeginVerification CloseBackup DrainNode DumpStacks FetchBackup FetchLog GetCheckpoint"
    " GetStatus GetVerification ListMembers OpenBackup ReloadFiles SetLogLevel TraceHops"
    " TransferLeadership",
    "at_once": "Ack ChangeMembers Extend Nack Receive",
    "while_memory_is_high": "Ack Cancel ChangeMembers CloseBackup Consume DeleteGroup DeleteTopic"
    " DrainNode DumpStacks Extend GetCheckpoint GetStatus ListMembers Nack ReloadFiles SetLogLevel"
    " TransferLeadership",
}
REPEATS = {
    Repeat.SAFE: "Ack CreateGroup CreateTopic Extend Nack Receive RedriveLetters RegisterProducer"
    " UnregisterProducer",
    Repeat.READ: "CloseBackup CountTimers DescribePolicies DumpStacks FetchBackup FetchLog"
    " GetCheckpoint GetSeries GetStatus GetTimer GetVerification ListMembers ListProducers"
    " ListSeries ListTimers ListTopics OpenBackup Peek ReadMessages TellStory",
}


def test_each_property_has_its_methods() -> None:
    for name, methods in PROPERTIES.items():
        found = {method for method, rule in CONTRACT_RULES.items() if getattr(rule, name)}
        assert found == {*methods.split()}, name
    unimplemented = [path for path, rule in METHOD_RULES.items() if rule.denied_unimplemented]
    assert unimplemented == ["/grpc.health.v1.Health/Watch"]
    for repeat, methods in REPEATS.items():
        found = {method for method, rule in CONTRACT_RULES.items() if rule.repeat is repeat}
        assert found == {*methods.split()}, repeat
