"""Bytes on their way to a client: they stay as they are while they are read, and nobody waits for one that is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from skyproxy.errors import SessionLostError
from skyproxy.protocol.messages import Chunk, Landed
from skyproxy_server import outgoing_transfer
from skyproxy_server.outgoing_transfer import OutgoingTransfer
from skyproxy_server.transfers import Transfers

CHUNK = 1000


class SlowClient:
    """The bulk connection of a client that reads nothing before it is told to."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_called, self.reads = threading.Event(), threading.Event()
        self.is_cut = False

    def send(self, message: Any) -> None:
        if self.is_cut:
            raise SessionLostError("it was cut")
        assert isinstance(message, Chunk)
        self.is_called.set()
        assert self.reads.wait(60)
        if self.is_cut:
            raise SessionLostError("it was cut")
        self.sent.append(bytes(message.buffers[0]))

    def cut(self) -> None:
        self.is_cut = True
        self.reads.set()


class Downloading:
    """A download of a lasting session that its client does not read."""

    def __init__(self) -> None:
        self.client = SlowClient()
        self.transfers = Transfers(CHUNK)
        self.transfers.lasting = True
        self.transfers.on_deserted = self.client.cut
        self.departure = self.transfers.depart(3, torch.arange(5 * CHUNK, dtype=torch.uint8))
        self.sender = threading.Thread(target=self.transfers.sender(self.client))  # type: ignore[arg-type]
        self.sender.start()
        assert self.client.is_called.wait(60)

    def finish(self) -> None:
        self.client.reads.set()
        self.transfers._departures.put(None)
        self.sender.join(60)
        assert not self.sender.is_alive()


def test_a_client_that_says_it_has_what_is_being_read_does_not_let_it_change() -> None:
    download = Downloading()
    download.transfers.on_landed(Landed(3, 5 * CHUNK))
    assert not download.departure.finished()  # what changes it could free memory that the sender reads
    download.finish()
    assert download.departure.finished()
    assert len(download.client.sent) == 1  # what nobody wants is not read any further


def test_what_nobody_wants_is_not_read() -> None:
    transfers, client = Transfers(CHUNK), SlowClient()
    transfers.lasting = True
    transfers.depart(3, torch.zeros(CHUNK))
    transfers.on_landed(Landed(3, 4 * CHUNK))
    transfers._departures.put(None)
    transfers.sender(client)()  # type: ignore[arg-type]
    assert not client.is_called.is_set()


@pytest.mark.parametrize("is_begun", [False, True])
def test_nobody_waits_for_a_client_that_is_gone_for_good(monkeypatch: pytest.MonkeyPatch, is_begun: bool) -> None:
    monkeypatch.setattr(outgoing_transfer, "LOOK_SECONDS", 0.01)
    if not is_begun:  # its bulk connection never came
        OutgoingTransfer(3, torch.zeros(2), lambda: True).wait()
        return
    download = Downloading()
    waiting = threading.Thread(target=download.departure.wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    download.transfers.has_left = lambda: True
    waiting.join(60)
    assert not waiting.is_alive()
    assert download.client.is_cut
    download.finish()


def test_a_download_that_breaks_off_is_waited_for_until_its_client_comes_back_or_is_gone() -> None:
    download = Downloading()
    download.client.cut()
    download.sender.join(60)
    assert not download.departure.finished()
    download.transfers.end()
    assert download.departure.finished()
