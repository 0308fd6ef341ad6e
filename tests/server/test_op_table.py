"""The table of a session's commands: how ops get their numbers, and what their first run does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Message, Warned
from skyproxy_server import op_table
from skyproxy_server.devices import WorkerDevices
from skyproxy_server.gates import Gates
from skyproxy_server.kernel_warnings import KernelWarning
from skyproxy_server.op_table import OpTable
from skyproxy_server.random_state import RandomState
from skyproxy_server.reports import Reports

FIRST = commands.FIRST_SIGNATURE
RELU = ["aten::relu", ["t"], {}, ["n"]]
VAR = ["aten::var.correction", ["t", "v"], {}, ["n"]]


class Table:
    """An op table, and what its client was told."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        devices = WorkerDevices([{"type": "cpu", "index": 0, "name": "CPU"}])
        self.ops = OpTable(Reports(self.sent.append), RandomState(devices), Gates(), on_cpu=True, max_signatures=2)

    def define(self, number: int, definition: list[Any]) -> int:
        return self.run([commands.DEFINE, number, definition])

    def run(self, stream: list[Any], slots: dict[int, Any] | None = None) -> int:
        handler = self.ops.handlers[stream[0]]
        assert handler is not None
        return handler({} if slots is None else slots, stream, 0)


def test_ops_are_numbered_in_order() -> None:
    table = Table()
    assert table.define(FIRST, RELU) == 3
    assert table.ops.signatures[FIRST].name == "aten::relu"
    with pytest.raises(ProtocolError, match="out of order"):
        table.define(FIRST + 2, RELU)


def test_a_table_has_a_bound() -> None:
    table = Table()
    table.define(FIRST, RELU)
    table.define(FIRST + 1, VAR)
    with pytest.raises(ProtocolError, match="more than 2"):
        table.define(FIRST + 2, RELU)


def test_the_first_number_starts_the_table_anew() -> None:
    table = Table()
    table.define(FIRST, RELU)
    table.define(FIRST + 1, VAR)
    table.define(FIRST, VAR)
    assert [signature.name for signature in table.ops.signatures.values()] == ["aten::var.correction"]
    assert len(table.ops.handlers) == FIRST + 1


def test_an_op_is_listened_to_until_it_ran_without_a_warning() -> None:
    table = Table()
    table.define(FIRST, RELU)
    signature = table.ops.signatures[FIRST]
    assert table.ops.handlers[FIRST] is not signature.handler
    slots: dict[int, Any] = {1: torch.tensor([-1.0, 2.0])}
    assert table.run([FIRST, 1, 2], slots) == 3
    assert slots[2].tolist() == [0, 2]
    assert table.ops.handlers[FIRST] is signature.handler


def test_an_op_that_warns_is_listened_to_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(run: Callable[[], int], found: list[KernelWarning]) -> int:
        found.append(KernelWarning("UserWarning", "careful"))
        return run()

    monkeypatch.setattr(op_table, "collect", collect)
    table = Table()
    table.define(FIRST, RELU)
    slots: dict[int, Any] = {1: torch.ones(1)}
    table.run([FIRST, 1, 2], slots)
    table.run([FIRST, 1, 2], slots)
    assert [type(message) for message in table.sent] == [Warned, Warned]
    assert table.ops.signatures[FIRST].warns


def test_built_in_commands_come_from_whoever_has_them() -> None:
    table = Table()
    table.ops.add_built_in({commands.RELEASE: lambda slots, stream, position: position + 2})
    assert table.run([commands.RELEASE, []]) == 2
