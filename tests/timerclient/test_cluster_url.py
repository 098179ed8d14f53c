"""The address of a cluster as a URL, and the environment."""

from collections.abc import Callable
from pathlib import Path

import pytest

from timerclient import AsyncTimerClient, ClientTls, InvalidRequest, TimerApp, TimerClient
from timerclient.values.cluster_url import ClusterUrl

ENVIRON = {"TIMERS_TLS_CA": "/e/ca", "TIMERS_TLS_CERT": "/e/c", "TIMERS_TLS_KEY": "/e/k"}


def test_url_names_addresses_tls_and_token() -> None:
    read = ClusterUrl.read
    assert read("timers://10.0.0.1:7401,[::1]:7402/", {}) == ClusterUrl("10.0.0.1:7401,[::1]:7402")
    assert read("timers://a:1", {"TIMERS_TOKEN": "t"}).token is None
    own = read("timers+tls://a:1?ca=/u/ca&server_name=nodes.x&token_file=/u/t", {})
    assert own.tls == ClientTls(ca="/u/ca", server_name="nodes.x")
    assert own.token == Path("/u/t")
    mixed = read("timers+tls://a:1?ca=/u/ca", ENVIRON | {"TIMERS_TOKEN": "secret"})
    assert mixed.tls == ClientTls(ca="/u/ca", certificate="/e/c", key="/e/k")
    assert mixed.token == "secret"
    named = read("timers+tls://a:1?token_file=/u/t", ENVIRON | {"TIMERS_TOKEN": "secret"})
    assert named.token == Path("/u/t")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://a:1", "url = 'http://a:1': must begin with timers:// or timers\\+tls://"),
        ("timers://a:1?ca=x", "url = '…\\?ca=': the parameters of timers\\+tls"),
        ("timers+tls://a:1?pw=x", "the parameters of timers\\+tls:// are ca, cert, key"),
        ("timers+tls://a:1", "TLS needs the nodes' authorities: \\?ca=FILE, or TIMERS_TLS_CA"),
        ("timers://secret@a:1", "has no user and no token: set TIMERS_TOKEN"),
    ],
)
def test_url_of_another_form_is_refused_and_shows_no_secret(url: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        ClusterUrl.read(url, {})
    assert "secret" not in str(refused.value)


def test_client_and_app_take_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="'a': must be host:port"):
        TimerClient("timers://a")
    makers: list[Callable[[], object]] = [
        *(TimerClient, AsyncTimerClient),
        lambda: TimerApp().thread_client,
        lambda: TimerApp("").thread_client,
    ]
    unset = "cluster: set the variable TIMERS_URL to timers://HOST:PORT"
    for value, text in (("", unset), ("timers://b", "'b': must be host:port")):
        monkeypatch.setenv("TIMERS_URL", value)
        for make in makers:
            with pytest.raises(InvalidRequest, match=text):
                make()
    monkeypatch.delenv("TIMERS_URL")
    with pytest.raises(InvalidRequest, match=unset):
        TimerClient()
