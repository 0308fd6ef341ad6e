"""A peer that breaks the rules of the protocol ends its own session, and no other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.errors import SessionLostError
from skyproxy.protocol.messages import Batch, Sequence
from skyproxy.settings import SETTINGS
from tests.integration.programs import worker


@pytest.fixture(scope="module")
def shared_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with worker(tmp_path_factory.mktemp("worker")) as place:
        yield place


@pytest.fixture
def intruder(shared_worker: tuple[str, str]) -> Iterator[tuple[skyproxy.Node, skyproxy.Node]]:
    """Two clients of one worker; the first will misbehave."""
    url, token = shared_worker
    with skyproxy.connect(url, token=token) as bad, skyproxy.connect(url, token=token) as good:
        yield bad, good


STREAMS: dict[str, list[Any]] = {
    "an op that was never defined": [4711, 1, 2],
    "a command that does not exist": [17],
    "a negative number": [-5, 1],
    "no number": ["add", 1],
    "a cut command": [5, 1],
    "EXPECT before nothing": [2, []],
    "EXPECT before no op": [2, [], 3, [1]],
    "a definition out of order": [1, 999, ["aten::relu", ["t"], {}, ["n"]]],
    "a malformed definition": [1, 32, "aten::relu"],
    "an unknown template": [1, 32, ["aten::relu", ["?"], {}, ["n"]]],
    "too many arguments": [1, 32, ["aten::relu", ["t"] * 9, {}, ["n"]]],
    "another number of results": [1, 32, ["aten::relu", ["t"], {}, ["n", "n"]]],
    "an unknown control": [9, "no_such_control", []],
    "an upload without bytes": [4, 1, ["float32", [2], [1], 0], ["cpu", None]],
    "a dtype that does not exist": [4, 1, ["float33", [2], [1], 0], ["cpu", None]],
    "a slot that holds nothing": [6, 1, 31337, 0],
}


@pytest.mark.parametrize("name", STREAMS)
def test_malformed_commands_end_that_session_only(intruder: tuple[skyproxy.Node, skyproxy.Node], name: str) -> None:
    bad, good = intruder
    kept = torch.arange(3.0, device=good.devices[0])
    bad.synchronize()
    session = bad._session
    session.recorder.stream.extend(STREAMS[name])
    with pytest.raises(SessionLostError):
        session.recorder.flush()
        bad.synchronize()
    assert (kept + 1).tolist() == [1, 2, 3]
    assert good.alive


def _link(connection: Any) -> Any:
    """The WebSocket of a connection that is replaced when it breaks."""
    return connection._link


def test_a_batch_out_of_order_ends_that_session_only(intruder: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    bad, good = intruder
    kept = torch.arange(3.0, device=good.devices[0])
    bad.synchronize()
    transport = _link(bad._session._operations)
    wrong = Batch(Sequence(bad._session.recorder.batches + 7), [])
    # Past our own rules, as a broken client would.
    from skyproxy.protocol import framing

    transport._outbox.post(transport._frame(framing.encode(wrong, SETTINGS.max_frame_bytes)))
    with pytest.raises(SessionLostError, match="none may be missing"):
        bad.synchronize()
        bad.synchronize()
    assert (kept + 1).tolist() == [1, 2, 3]


def test_an_oversized_frame_ends_that_session_only(intruder: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    bad, good = intruder
    kept = torch.arange(3.0, device=good.devices[0])
    bad.synchronize()
    from skyproxy.transport import websocket_frames as ws
    from skyproxy.transport.outbox import Frame

    header = ws.frame_header(ws.BINARY, SETTINGS.max_frame_bytes + 1, b"abcd")
    _link(bad._session._operations)._outbox.post(Frame([header], len(header)))
    with pytest.raises(SessionLostError):
        bad.synchronize()
        bad.synchronize()
    assert (kept + 1).tolist() == [1, 2, 3]


def test_garbage_on_the_bulk_connection_ends_that_session_only(intruder: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    bad, good = intruder
    kept = torch.arange(3.0, device=good.devices[0])
    bad.synchronize()
    transport = _link(bad._session._bulk)
    transport._outbox.post(transport._small_frame(2, b"\x00" * 64))
    with pytest.raises(SessionLostError):
        for _ in range(1000):
            bad.synchronize()
    assert (kept + 1).tolist() == [1, 2, 3]


def test_a_goodbye_of_the_worker_is_the_reason_that_users_see(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token), skyproxy.connect(url, token=token) as node:
        os.kill(node.run(os.getpid), signal.SIGTERM)
        with pytest.raises(SessionLostError, match=r"shutting down.*tensors on the CPU are unharmed"):
            while True:  # it may answer once more before it goes
                node.synchronize()
