"""A right message of every class, a right command of every number and a right request to every control.

Attacks begin from these, see `hostile_messages`. Who adds a message, a command or a control adds a sample here: a test
fails where one is missing.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyproxy.protocol import commands
from skyproxy.protocol.call_messages import CallAck, CallAttach, CallCancel, CallData, CallStart
from skyproxy.protocol.messages import (
    BULK,
    FUNCTIONS,
    JOB_ACTIONS,
    JOBS,
    OPERATIONS,
    Batch,
    CancelOperations,
    CancelTransfer,
    Chunk,
    Continue,
    Goodbye,
    Hello,
    JobRequest,
    Landed,
    Message,
    NamedBatch,
    Offer,
    PackedChunk,
    Ping,
    Pong,
    Proof,
    Received,
    Repeat,
    RequestId,
    Sequence,
)

CPU = ["cpu", None]
FLOATS = ["float32", [4], [1], 0]
ADD = commands.FIRST_SIGNATURE
COMPILED = ADD + 1
NESTED = ADD + 2
"""Numbers of the signatures that `FIRST_COMMANDS` define."""

FIRST_COMMANDS: list[list[Any]] = [
    [commands.UPLOAD, 1, FLOATS, CPU],
    [commands.UPLOAD, 2, FLOATS, CPU],
    [commands.DEFINE, ADD, ["aten::add.Tensor", ["t", "t"], {}, ["n"]]],
    [
        commands.DEFINE,
        COMPILED,
        [
            commands.COMPILED,
            ["t"],
            {"nodes": [["aten::neg", [["node", 0]], {}]], "outputs": [1], "options": {"worker": "eager"}},
            ["n"],
        ],
    ],
    [commands.DEFINE, NESTED, ["aten::_nested_tensor_from_tensor_list", ["T"], {}, ["n"]]],
    [NESTED, [1, 2], 6],
    [commands.DO, "new_generator", [7, CPU]],
    [commands.DO, "record_event", [8, CPU, False]],
    [commands.DO, "record_event", [9, CPU, False]],
]
"""What a session begins with, so that the samples find their values."""
FIRST_BUFFERS = [bytes(16), bytes(16)]


@dataclass
class Place:
    """What the next messages of one session refer to.

    Attributes:
        chance: what decides all that is left to chance.
        session: its name.
        sequence: its newest batch.
        request: its newest question.
        transfer: its newest transfer.
        call: its newest call.
        tasks: recorded beginnings of calls; none where functions are not attacked.
        is_apart: whether the session has a process of its own, so that payloads may be changed that it unpickles.
    """

    chance: random.Random
    session: str = ""
    sequence: int = 0
    request: int = 0
    transfer: int = 100
    cancellation: int = 0
    call: str = "0" * 32
    tasks: tuple[CallStart, ...] = ()
    is_apart: bool = False
    named: int = 0
    graphs: int = 0
    signature: int = NESTED

    def next_sequence(self) -> Sequence:
        self.sequence += 1
        return Sequence(self.sequence)

    def next_request(self) -> RequestId:
        self.request += 1
        return RequestId(self.request)

    def next_signature(self) -> int:
        self.signature += 1
        return self.signature

    def next_transfer(self) -> int:
        self.transfer += 1
        return self.transfer

    def next_call(self) -> str:
        self.call = f"{self.chance.getrandbits(128):032x}"
        return self.call


def hello(role: str, session: str = "", grace_seconds: int = 0, secret: bytes = b"", received: int = 0) -> Hello:
    return Hello([1], role, session, {"skyproxy": "0"}, grace_seconds, secret, received)


# --- controls --------------------------------------------------------------------------------------------------------

_STATE = bytes(5056)

CONTROL_SAMPLES: dict[str, Callable[[Place], list[Any]]] = {
    "synchronize": lambda place: [],
    "end_cancellation": lambda place: [place.cancellation],
    "stats": lambda place: [],
    "blob_stats": lambda place: [],
    "item": lambda place: [1],
    "numbers": lambda place: [1, [1, 2]],
    "equal": lambda place: [1, 2],
    "take_apart": lambda place: [1, [21, 22, 23, 24]],
    "copy_to_device": lambda place: [25, 1, CPU],
    "set_modes": lambda place: [{"default_dtype": "float64"}],
    "modes_in_force": lambda place: [],
    "manual_seed": lambda place: [CPU, 5],
    "random_state": lambda place: [CPU],
    "set_random_state": lambda place: [CPU, _STATE],
    "keep_random_state": lambda place: [26, CPU],
    "restore_random_state": lambda place: [7, CPU],
    "initial_seed": lambda place: [CPU],
    "new_generator": lambda place: [27, CPU],
    "seed_generator": lambda place: [7, 3],
    "generator_state": lambda place: [7],
    "set_generator_state": lambda place: [7, _STATE],
    "generator_seed": lambda place: [7],
    "copy_generator_state": lambda place: [7, 7],
    "differentiated": lambda place: [28, [6], [ADD, 6, 6, 29]],
    "differentiate": lambda place: [28, [29], [0], [30]],
    "set_storage": lambda place: [2, 1, 0, [4], [1]],
    "view_storage": lambda place: [31, 1, "float32", 0, [2], [1]],
    "resize_storage": lambda place: [2, 16],
    "storage_bytes": lambda place: [1],
    "memory_stats": lambda place: [CPU],
    "memory_summary": lambda place: [CPU],
    "reset_peak_memory": lambda place: [CPU],
    "empty_cache": lambda place: [],
    "record_event": lambda place: [8, CPU, False],
    "wait_event": lambda place: [8],
    "query_event": lambda place: [8],
    "elapsed_milliseconds": lambda place: [8, 9],
    "clock": lambda place: [],
    "profile_start": lambda place: [True, False],
    "profile_stop": lambda place: [32],
    "device_properties": lambda place: [CPU],
    "hold_named": lambda place: [f"name {place.chance.randrange(4)}", place.chance.random() < 0.5],
    "put_named": lambda place: ["key", b"document", [1, 2]],
    "named_value": lambda place: ["key"],
    "adopt_named": lambda place: ["key", 1, [33, 34]],
    "leave_named": lambda place: ["name", "session", "wss://there"],
    "list_named": lambda place: [],
    "forget_named": lambda place: ["key"],
    "named_sessions": lambda place: [],
    "end_named": lambda place: [f"name {place.chance.randrange(4)}"],
    "save_snapshot": lambda place: [_snapshot(place)],
    "load_snapshot": lambda place: [_snapshot(place), place.chance.choice(("", "1", "../1"))],
    "list_snapshots": lambda place: [_snapshot(place)],
    "delete_snapshot": lambda place: [_snapshot(place), place.chance.choice(("", "1", "../1"))],
    "open_snapshot": lambda place: [_snapshot(place), place.chance.choice(("", "1", "../1"))],
    "adopt_snapshot": lambda place: [[[place.chance.randrange(-1, 40), place.chance.randrange(-1, 40)]]],
    "read_snapshot": lambda place: [_snapshot(place), "", place.chance.choice((0, -1, 1 << 40))],
    "read_snapshot_piece": lambda place: [place.chance.choice((b"", b"x" * 32, b"x" * 40))],
    "begin_snapshot": lambda place: [_snapshot(place), place.chance.choice((0, 3, -1, 1 << 50))],
    "write_snapshot_piece": lambda place: [place.chance.choice((b"", b"piece", b"x" * (5 << 20)))],
    "write_snapshot": lambda place: [place.chance.choice((b"", b"\xc1", b"\x80")), place.chance.random() < 0.5],
    "graph_begin": lambda place: [],
    "graph_define": lambda place: [_next_graph(place), [ADD, 1, 2, 35], [[35, FLOATS]], [CPU], {}],
    "graph_abort": lambda place: [[36]],
    "graph_forget": lambda place: [place.graphs],
    "graph_report": lambda place: [],
    "compiler_trouble": lambda place: [CPU],
    "forget_compiled": lambda place: [COMPILED],
    "compile_report": lambda place: [],
    "bind_call": lambda place: [place.call, [1], place.chance.random() < 0.5],
    "adopt_results": lambda place: [place.call, 2, [37]],
    "forget_call": lambda place: [place.call],
}
"""The arguments of a request to each control."""


def _snapshot(place: Place) -> str:
    return place.chance.choice(("", "one", "one", "two", "../../outside", "/outside", "a/b", ".", "..", "\0"))


def _next_graph(place: Place) -> int:
    place.graphs += 1
    return place.graphs


def control(place: Place, name: str = "") -> list[Any]:
    """A request to a control, as a command."""
    name = name or place.chance.choice(sorted(CONTROL_SAMPLES))
    arguments = CONTROL_SAMPLES[name](place)
    if place.chance.random() < 0.7:
        return [commands.CALL, place.next_request(), name, arguments]
    return [commands.DO, name, arguments]


# --- commands --------------------------------------------------------------------------------------------------------

COMMAND_SAMPLES: dict[int, Callable[[Place], list[Any]]] = {
    commands.DEFINE: lambda place: [
        commands.DEFINE,
        place.next_signature(),
        place.chance.choice(
            (
                ["aten::add.Tensor", ["t", "t"], {"alpha": "v"}, ["n"]],
                ["aten::cat", ["T", "v"], {}, ["n"]],
                ["aten::sum", ["t"], {"dtype": [commands.CONSTANT, "dtype", "float64"]}, ["n"]],
                ["aten::add_.Tensor", ["t", ["k", "float32"]], {}, [commands.IGNORED]],
                ["aten::split.Tensor", ["t", "v"], {}, [commands.NEW_LIST]],
            )
        ),
    ],
    commands.EXPECT: lambda place: [commands.EXPECT, [FLOATS, FLOATS, FLOATS], ADD, 1, 2, 38],
    commands.RELEASE: lambda place: [commands.RELEASE, [38]],
    commands.UPLOAD: lambda place: [commands.UPLOAD, 3, FLOATS, CPU],
    commands.RECEIVE: lambda place: [commands.RECEIVE, 4, FLOATS, CPU, place.transfer],
    commands.FETCH: lambda place: [
        commands.FETCH,
        place.next_request(),
        1,
        place.next_transfer() if place.chance.random() < 0.5 else 0,
    ],
    commands.DESCRIBE: lambda place: [commands.DESCRIBE, place.next_request(), [1], [2]],
    commands.CALL: lambda place: [commands.CALL, place.next_request(), "stats", []],
    commands.DO: lambda place: [commands.DO, "new_generator", [39, CPU]],
    commands.REPLAY: lambda place: [commands.REPLAY, max(place.graphs, 1)],
}
"""A command of each number."""


def some_command(place: Place) -> list[Any]:
    """A right command: built-in ones, requests to controls, and operations."""
    match place.chance.randrange(5):
        case 0 | 1:
            return control(place)
        case 2:
            return [place.chance.choice((ADD, ADD, COMPILED)), 1, 2, 38][: place.chance.choice((4, 4, 3))]
    return COMMAND_SAMPLES[place.chance.choice(sorted(COMMAND_SAMPLES))](place)


def stream_of(found: list[list[Any]]) -> tuple[list[Any], tuple[bytes, ...]]:
    """The stream of some commands, and a buffer for each upload in it."""
    uploads = sum(bool(command) and command[0] == commands.UPLOAD for command in found)
    return [item for command in found for item in command], (bytes(16),) * uploads


def _batch(place: Place) -> Message:
    stream, buffers = stream_of([[ADD, 1, 2, 38]])
    return Batch(place.next_sequence(), stream, buffers)


def _named_batch(place: Place) -> Message:
    place.named = place.chance.randrange(1, 6)
    return NamedBatch(place.next_sequence(), [ADD, 1, 2, 38], place.named, [1, 3])


def _repeat(place: Place) -> Message:
    if not place.named:
        return _named_batch(place)
    return Repeat(place.next_sequence(), place.named, [0, 2, 1, 38])


def _packed_chunk(place: Place) -> Message:
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(bytes(16)) + packer.flush()
    return PackedChunk(place.next_transfer(), 0, 16, 16, 4, (packed,))


def _call_start(place: Place) -> Message:
    if not place.tasks:
        task = {"name": "f", "results": "plain", "context": b"", "tensors": [], "bases": [], "timeout": None}
        return CallStart(place.next_call(), task, [1], (b"x",))
    recorded = place.chance.choice(place.tasks)
    buffers = [bytes(item) for item in recorded.buffers]
    if place.is_apart and place.chance.random() < 0.3:
        buffers = [_with_other_bytes(item, place.chance) for item in buffers]
    return CallStart(place.next_call(), recorded.task, [len(item) for item in buffers], tuple(buffers))


def _with_other_bytes(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randrange(3) if found else 0):
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found if chance.random() < 0.9 else found[: len(found) // 2])


def _job_request(place: Place) -> Message:
    action = place.chance.choice(sorted(JOB_ACTIONS))
    value = {
        "name": "job",
        "kind": "script",
        "title": "a job",
        "max_restarts": 0,
        "grace_seconds": 0.1,
        "env": {},
        "part": [0, 1],
        "payload_bytes": 1,
        "offset": 0,
        "limit": 100,
        "wait_seconds": 0.0,
    }
    return JobRequest(place.next_request(), action, value, (b"x",) if action == "data" else ())


MESSAGE_SAMPLES: dict[type[Message], Callable[[Place], Message]] = {
    Hello: lambda place: hello(place.chance.choice((OPERATIONS, BULK, FUNCTIONS, JOBS)), place.session),
    Goodbye: lambda place: Goodbye("done", "enough"),
    Batch: _batch,
    NamedBatch: _named_batch,
    Repeat: _repeat,
    Received: lambda place: Received(0),
    Chunk: lambda place: Chunk(place.next_transfer(), 0, 16, (bytes(16),)),
    PackedChunk: _packed_chunk,
    CancelTransfer: lambda place: CancelTransfer(place.next_transfer(), "no need"),
    Landed: lambda place: Landed(place.transfer, 16),
    Continue: lambda place: Continue([place.transfer], {place.transfer: 0}),
    CancelOperations: lambda place: CancelOperations(place.cancellation + 1),
    Offer: lambda place: Offer(place.next_transfer(), 16, place.chance.choice((b"", bytes(32)))),
    Proof: lambda place: Proof(place.transfer, bytes(32)),
    Ping: lambda place: Ping(1),
    Pong: lambda place: Pong(0, {"leaving": place.chance.randrange(2)}),
    CallStart: _call_start,
    CallData: lambda place: CallData(place.call, 0, 0, 0, (b"x",)),
    CallAck: lambda place: CallAck(place.call, 1, 1),
    CallCancel: lambda place: CallCancel(place.call, "no need"),
    CallAttach: lambda place: CallAttach(place.call, 0),
    JobRequest: _job_request,
}
"""A message of each class that a client may send."""
