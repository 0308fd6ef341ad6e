"""The commands that move tensors: what they keep, what they answer, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import CancelTransfer, Failure, Message, Reply
from skyproxy.settings import SETTINGS
from skyproxy.torch_codec import describe, encode_description
from skyproxy_server.devices import WorkerDevices
from skyproxy_server.failures import Failed
from skyproxy_server.reports import Reports
from skyproxy_server.tensor_commands import TensorCommands
from skyproxy_server.transfers import Transfers
from skyproxy_server.values import Values

CPU = ["cpu", None]
LOOK = encode_description(describe(torch.ones(2)))


class Session:
    """The commands, and what the client was told."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        reports = Reports(self.sent.append)
        self.values = Values(reports)
        self.transfers = Transfers(SETTINGS.chunk_bytes)
        devices = WorkerDevices([{"type": "cpu", "index": 0, "name": "CPU"}])
        self.commands = TensorCommands(self.values, reports, self.transfers, devices)

    def run(self, *command: Any) -> int:
        return self.commands.handlers[command[0]](self.values.slots, list(command), 0)


@pytest.fixture
def session() -> Session:
    return Session()


def test_every_handler_steps_over_its_operands(session: Session) -> None:
    session.values.slots[1] = torch.ones(2)
    session.commands.buffers = [bytes(8)]
    for number, operands in (
        (commands.UPLOAD, (2, LOOK, CPU)),
        (commands.RECEIVE, (3, LOOK, CPU, 5)),
        (commands.FETCH, (7, 1, 0)),
        (commands.DESCRIBE, (8, [1], [])),
    ):
        assert session.run(number, *operands) == 1 + commands.OPERANDS[number] == 1 + len(operands)
    assert set(session.commands.handlers) == {commands.UPLOAD, commands.RECEIVE, commands.FETCH, commands.DESCRIBE}


def test_an_upload_is_a_copy_of_the_batchs_next_buffer(session: Session) -> None:
    data = bytearray(torch.tensor([1.0, 2.0]).numpy().tobytes())
    session.commands.buffers = [bytes(8), data]
    session.run(commands.UPLOAD, 1, LOOK, CPU)
    data[:] = bytes(8)
    session.run(commands.UPLOAD, 2, LOOK, CPU)
    assert session.values.slots[1].tolist() == [1, 2]
    assert session.values.slots[2].tolist() == [0, 0]


@pytest.mark.parametrize("buffers", [[], [bytes(7)], [bytes(12)]])
def test_an_upload_without_its_bytes_ends_the_session(session: Session, buffers: list[bytes]) -> None:
    session.commands.buffers = list(buffers)
    with pytest.raises(ProtocolError, match="an upload of 8 bytes"):
        session.run(commands.UPLOAD, 1, LOOK, CPU)


def test_an_upload_that_its_client_gives_up_poisons_its_slot_and_is_not_told(session: Session) -> None:
    session.run(commands.RECEIVE, 1, LOOK, CPU, 5)
    assert isinstance(session.values.slots[1], torch.Tensor)
    session.transfers.on_cancel(CancelTransfer(5, "interrupted"))
    session.run(commands.FETCH, 7, 1, 0)
    assert isinstance(session.values.slots[1], Failed)
    (refusal,) = session.sent
    assert isinstance(refusal, Failure)
    assert refusal.request == 7


def test_a_value_is_fetched_packed(session: Session) -> None:
    session.values.slots[1] = torch.arange(4.0)[::2]
    session.run(commands.FETCH, 7, 1, 0)
    (reply,) = session.sent
    assert isinstance(reply, Reply)
    assert (reply.value, len(reply.buffers[0])) == (None, 8)


def test_a_description_says_what_a_value_is_an_alias_of(session: Session) -> None:
    base = torch.arange(4.0)
    session.values.slots.update({1: base, 2: base[:2], 3: [torch.ones(2), base], 4: 5})
    session.run(commands.DESCRIBE, 7, [2, 3, 4], [9, 1])
    (reply,) = session.sent
    assert isinstance(reply, Reply)
    view, parts, number = reply.value
    assert view == [LOOK, 1]
    assert parts == ["list", [[LOOK, -1], [encode_description(describe(base)), 1]]]
    assert number == [None, 5]
