"""Limits of an identity: their tables in the rules, and what they count."""

import pytest

from cluster.security.access_rules import parse_rules
from cluster.security.caller_limits import CallerLimits, CallerUsage
from cluster.security.identities import CallerIdentity, IdentityKind
from timer.model.timer_errors import CallerLimitError, ConfigError

BEGIN = '[[rule]]\nwho = ["client/*"]\nmay = ["produce"]\n'


def test_the_least_limits_of_all_rules_about_an_identity_count() -> None:
    rules = parse_rules(
        f"{BEGIN}rate = {{ requests = 9, rows = 50 }}\n"
        f"{BEGIN.replace('*', 'a')}rate = {{ requests = 4 }}\nmost = {{ streams = 2 }}\n"
    )
    found = rules.limits(CallerIdentity(IdentityKind.CLIENT, "a"))
    assert found == CallerLimits(requests=4, rows=50, streams=2)
    assert rules.limits(CallerIdentity(IdentityKind.ADMIN, "a")) == CallerLimits()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("rate = 5", "rule 1: rate = 5: a table with requests, rows, bytes"),
        ("rate = { streams = 5 }", "rule 1: rate = 'streams': one of requests"),
        ("most = { streams = 0 }", "rule 1: most.streams = 0: 1 to"),
        ("most = { streams = true }", "rule 1: most.streams = True: 1 to"),
    ],
)
def test_a_malformed_limit_is_rejected_by_name(line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_rules(BEGIN + line)


def test_a_rate_is_refused_with_its_value_until_the_debt_is_paid() -> None:
    usage, limits = CallerUsage("client/a"), CallerLimits(requests=2, rows=100)
    usage.charge(limits, 10.0, requests=1, rows=250, bytes=0)
    with pytest.raises(CallerLimitError) as caught:
        usage.charge(limits, 11.0, requests=1, rows=0, bytes=0)
    text = "rate.rows of client/a: must be at most 100 a second; retry after 511 ms"
    assert str(caught.value) == text
    for _ in range(2):
        usage.charge(limits, 11.6, requests=1, rows=1, bytes=0)
    with pytest.raises(CallerLimitError, match=r"rate.requests of client/a: must be at most 2"):
        usage.charge(limits, 11.6, requests=1, rows=1, bytes=0)
    usage.charge(CallerLimits(), 11.6, requests=1, rows=1, bytes=0)  # new rules


def test_open_calls_and_their_connections_are_limited() -> None:
    usage, limits = CallerUsage("client/a"), CallerLimits(streams=3, connections=2)
    for address in ("a", "a", "b"):
        usage.open(limits, address)
    with pytest.raises(CallerLimitError, match=r"most.streams of client/a: 3 are open"):
        usage.open(limits, "a")
    usage.close("a")
    with pytest.raises(CallerLimitError, match=r"most.connections of client/a: 2 are open"):
        usage.open(limits, "c")
    usage.close("b")
    usage.open(limits, "c")
