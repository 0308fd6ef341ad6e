"""A token goes to another machine only encrypted, unless somebody says otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

import skyproxy
from skyproxy.errors import ConfigurationError, ConnectError
from skyproxy.protocol.messages import Hello
from skyproxy.protocol.versions import SUPPORTED
from skyproxy.providers.worker_report import ask_worker
from skyproxy.settings import SETTINGS
from skyproxy.transport.addresses import check_confidential, is_loopback
from skyproxy.transport.websocket import connect_websocket

# A name that resolves nowhere (RFC 2606): whoever gets past the check fails at once, and reaches nobody.
ELSEWHERE = "ws://worker.invalid:8765"
HELLO = Hello(list(SUPPORTED), "operations", "", {})
REFUSAL = r"worker\.invalid:8765 would not be encrypted.*wss://.*insecure=True.*SKYPROXY_INSECURE=1"


def test_an_unencrypted_connection_to_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=REFUSAL):
        connect_websocket(ELSEWHERE, "a-token-of-some-length", HELLO)


def test_whoever_calls_it_insecure_gets_it() -> None:
    with pytest.raises(ConnectError):
        connect_websocket(ELSEWHERE, "a-token-of-some-length", HELLO, insecure=True)
    with pytest.raises(ConnectError):
        connect_websocket(ELSEWHERE, "a-token-of-some-length", HELLO, settings=replace(SETTINGS, insecure=True))
    with pytest.raises(ConnectError):
        connect_websocket(ELSEWHERE.replace("ws:", "wss:"), "a-token-of-some-length", HELLO)


def test_the_public_ways_to_connect_say_so_too() -> None:
    with pytest.raises(ConfigurationError, match=REFUSAL):
        skyproxy.connect(ELSEWHERE, token="a-token-of-some-length")
    with pytest.raises(ConnectError):
        skyproxy.connect(ELSEWHERE, token="a-token-of-some-length", insecure=True)
    with pytest.raises(ConfigurationError, match=REFUSAL):
        ask_worker(ELSEWHERE, "a-token-of-some-length")


def test_a_pool_of_remote_workers_says_so_too() -> None:
    with pytest.raises(ConfigurationError, match=REFUSAL):
        skyproxy.Compute(provider=skyproxy.Remote([ELSEWHERE], token="a-token-of-some-length")).start()
    remote = skyproxy.Remote([ELSEWHERE], token="a-token-of-some-length", insecure=True)
    with pytest.raises(ConnectError):
        skyproxy.Compute(provider=remote).start()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_this_machine_needs_no_encryption(host: str) -> None:
    check_confidential(host, host, insecure=False)


@pytest.mark.parametrize("host", ["10.0.0.1", "192.168.1.2", "localhost.example.org", "0.0.0.0", "127.0.0.1.invalid"])
def test_every_other_machine_does(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigurationError):
        check_confidential(host, host, insecure=False)
