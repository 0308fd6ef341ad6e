"""The worker's url, as a client reads it: what holds a secret is refused, and nothing else is."""

from __future__ import annotations

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.transport.addresses import parse_url

TOKEN = "0123456789abcdef-token"


@pytest.mark.parametrize("token", ["x", "w", "worker", "worker.example", "8765", "ws"])
def test_a_token_that_happens_to_be_part_of_the_address_is_no_secret_in_it(token: str) -> None:
    address = parse_url("ws://worker.example:8765/box", token)
    assert (address.host, address.port, address.url) == ("worker.example", 8765, "ws://worker.example:8765/box")


@pytest.mark.parametrize(
    ("url", "token"),
    [
        (f"ws://{TOKEN}@worker.example", TOKEN),
        ("ws://me:word@worker.example", TOKEN),
        (f"wss://worker.example/{TOKEN}", TOKEN),
        (f"wss://worker.example/v1-{TOKEN}-x", TOKEN),
        (f"wss://worker.example/?t={TOKEN}", TOKEN),
        (f"wss://worker.example/#{TOKEN}", TOKEN),
        ("wss://worker.example/x", "x"),
        ("wss://worker.example/?t=x", "x"),
        ("wss://worker.example/?token=", TOKEN),
        ("wss://worker.example/?api_key=1", TOKEN),
    ],
)
def test_a_url_with_a_secret_is_refused_without_showing_it(url: str, token: str) -> None:
    with pytest.raises(ConfigurationError, match="secret") as caught:
        parse_url(url, token)
    assert TOKEN not in str(caught.value)
