"""Messages whose values cannot be, whatever came before them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.protocol.message_checks import VALUE_CHECKS
from skyproxy.protocol.messages import Welcome

OSC = "\x1b]52;c;ZXZpbA==\x07"
DEVICE = {"type": "cuda", "index": 0, "name": "GPU", "total_memory_bytes": 1 << 36, "compute_capability": [9, 0]}
WELCOME = Welcome(1, "ab", {"torch": "2.13.0"}, [DEVICE, {"type": "cpu", "index": None}], {"functions": 1})


def test_a_welcome_with_devices_is_accepted() -> None:
    VALUE_CHECKS[Welcome](WELCOME)
    VALUE_CHECKS[Welcome](replace(WELCOME, devices=[]))


@pytest.mark.parametrize(
    "change",
    [
        {"session": OSC},
        {"session": "x" * 2000},
        {"software": {"torch": OSC}},
        {"software": {OSC: "2"}},
        {"software": {str(number): "" for number in range(2000)}},
        {"limits": {OSC: 1}},
        {"secret": bytes(1000)},
        {"received": -1},
        {"devices": [{}]},
        {"devices": [{"type": "cpu"}]},
        {"devices": [{"type": 7, "index": 0}]},
        {"devices": [{"type": OSC, "index": 0}]},
        {"devices": [{**DEVICE, "name": OSC}]},
        {"devices": [{**DEVICE, "name": 7}]},
        {"devices": [{**DEVICE, "index": -1}]},
        {"devices": [{**DEVICE, "index": "0"}]},
        {"devices": [{**DEVICE, "total_memory_bytes": 1e308}]},
        {"devices": [{**DEVICE, "compute_capability": [9]}]},
        {"devices": [{**DEVICE, "onednn_lstm": 5}]},
        {"devices": [DEVICE] * 5000},
    ],
    ids=lambda change: repr(change)[:60],
)
def test_a_welcome_that_no_worker_says_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="Welcome has"):
        VALUE_CHECKS[Welcome](replace(WELCOME, **change))
