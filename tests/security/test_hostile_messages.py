"""Every message, command and control in any form and order: no dead worker, no hang, no foreign byte, a quiet log."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands, framing
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.message_checks import MAX_TRANSFER_BYTES
from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import BULK, CLIENT, WORKER, Batch, Chunk, Offer, PackedChunk, Welcome
from skyproxy.settings import SETTINGS
from skyproxy_server import function_controls
from skyproxy_server.controls import CONTROLS
from skyproxy_server.executor import Executor
from skyproxy_server.limits import are_sessions_separable
from skyproxy_server.transfers import Transfers
from tests.security.besieged_worker import KINDS, besiege
from tests.security.hostile_messages import decode_frames
from tests.security.message_samples import (
    COMMAND_SAMPLES,
    CONTROL_SAMPLES,
    FIRST_BUFFERS,
    FIRST_COMMANDS,
    MESSAGE_SAMPLES,
    Place,
    hello,
    stream_of,
)
from tests.security.raw_client import frame_of, values_of

ATTACKS = 40
SECONDS = 5.0


def test_every_message_of_a_client_is_attacked() -> None:
    assert set(MESSAGE_SAMPLES) == {kind for kind in MESSAGES.values() if CLIENT in kind.senders}


def test_every_command_and_every_control_is_attacked() -> None:
    assert set(COMMAND_SAMPLES) == set(commands.OPERANDS)
    of_functions = {"bind_call", "adopt_results", "forget_call"}
    assert set(CONTROL_SAMPLES) == set(CONTROLS) | of_functions
    assert all(hasattr(function_controls, name) for name in of_functions)


@pytest.mark.parametrize("kind", MESSAGE_SAMPLES, ids=lambda kind: kind.__name__)
def test_an_attack_begins_from_a_right_message(kind: type) -> None:
    sample = MESSAGE_SAMPLES[kind](Place(random.Random(1), session="s", named=1))
    values, buffers = values_of(sample)
    decoded = framing.decode(frame_of(sample.code, values, buffers), 1 << 20)
    assert type(decoded) is kind
    assert values_of(decoded) == (values, buffers)


def test_an_attack_begins_from_right_commands_and_controls() -> None:
    executor = Executor(
        [{"type": "cpu", "index": 0, "name": "CPU"}], lambda message: None, Transfers(1 << 20), SETTINGS
    )
    place = Place(random.Random(1))
    stream, _ = stream_of(FIRST_COMMANDS)
    executor.run(Batch(place.next_sequence(), stream, tuple(FIRST_BUFFERS)))
    assert executor.state.reports.unreported == []
    for name, arguments in CONTROL_SAMPLES.items():
        if name in CONTROLS and not {"named", "snapshot"} & set(name.replace("snapshots", "snapshot").split("_")):
            request = [commands.CALL, place.next_request(), name, arguments(place)]
            with_graph = name in ("graph_define", "graph_abort")
            before = [commands.DO, "graph_begin", []] if with_graph else []
            after = [commands.DO, "graph_abort", [[]]] if name == "graph_begin" else []
            executor.run(Batch(place.next_sequence(), [*before, *request, *after]))
    place.transfer = 0
    for number in sorted(COMMAND_SAMPLES, reverse=True):
        if number not in (commands.RECEIVE, commands.REPLAY):
            stream, buffers = stream_of([COMMAND_SAMPLES[number](place)])
            executor.run(Batch(place.next_sequence(), stream, buffers))
    executor.end()


def test_no_client_has_a_worker_trace_the_python_of_all_threads() -> None:
    """PyTorch can leave the interpreter to no thread for ever, where it begins to do so beside others."""
    executor = Executor(
        [{"type": "cpu", "index": 0, "name": "CPU"}], lambda message: None, Transfers(1 << 20), SETTINGS
    )
    place = Place(random.Random(1))
    request = [commands.CALL, place.next_request(), "profile_start", [True, True]]
    executor.run(Batch(place.next_sequence(), request))
    try:
        assert executor.state.profile is not None
        assert not executor.state.profile._profiler.with_stack
        assert sys.getprofile() is None
    finally:
        executor.end()


def test_a_thousand_frames_are_decoded_or_refused() -> None:
    assert 300 < decode_frames(1000, 0) < 1000


@pytest.mark.parametrize(
    "message",
    [
        Offer(1, MAX_TRANSFER_BYTES + 1, b""),
        Chunk(1, 0, 2**64 - 1, (b"x",)),
        PackedChunk(1, 0, 2**64 - 1, 1, 1, (b"x",)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_no_transfer_announces_more_than_a_tensor_can_have(message: Offer | Chunk | PackedChunk) -> None:
    worker = Connection(WORKER)
    worker.on_receive(hello(BULK, "s"))
    worker.on_send(Welcome(1, "s", {}, [], {}))
    with pytest.raises(ProtocolError):
        worker.on_receive(message)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["in-process", "processes-functions"])
def test_a_worker_withstands_any_messages_and_training_beside_them_is_bit_identical(kind: str, tmp_path: Path) -> None:
    if "processes" in kind and not are_sessions_separable():
        pytest.skip("session processes need Linux")
    assert kind in KINDS
    report = besiege(kind, tmp_path, SECONDS, attacks=ATTACKS)
    assert report.problems == []
    assert report.attacks
    assert report.tally.sessions
    assert sum(report.tally.sent.values()) > report.attacks
