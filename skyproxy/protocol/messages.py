"""The messages of the wire, each defined once, with its code and who may send it.

A message is a frozen dataclass. Its fields travel in order as one msgpack array; `buffers`, where a message has
them, travel behind that array as raw bytes and never pass through the msgpack codec. Add a message here, to
the table in `message_table`, and a handler where it is consumed; framing needs no change. Messages of a functions
connection are in `call_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NewType

Slot = NewType("Slot", int)
"""The place of a value on the worker: an index that the client hands out. Slot 0 always holds None."""
RequestId = NewType("RequestId", int)
"""Names one question of the client, so that its answer finds the waiter."""
Sequence = NewType("Sequence", int)
"""The number of a batch within its session, from 1, without gaps."""

MAX_NAMES = 1024
"""Batches that a worker keeps for a session under a name; the client lets go of the one it used least lately."""

MAX_HELLO_BYTES = 16 << 10
"""The most bytes of a `Hello`: who has not been let in yet takes no memory, and many may try at a time."""
MAX_PACKED_BYTES = 64 << 20
"""The most bytes that one `PackedChunk` may unpack to: a few bytes could name any amount."""
MAX_ELEMENT_BYTES = 16

Buffer = bytes | bytearray | memoryview
CLIENT = "client"
WORKER = "worker"
OPERATIONS = "operations"
BULK = "bulk"
FUNCTIONS = "functions"
JOBS = "jobs"


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages.

    Attributes:
        code: the first byte of the frame.
        senders: which sides may send it.
        roles: the kinds of connection that it belongs on.
    """

    code: ClassVar[int]
    senders: ClassVar[frozenset[str]]
    roles: ClassVar[frozenset[str]] = frozenset({OPERATIONS})


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first message on a connection. `session` names the session that a bulk or functions connection joins, or that
    an operations connection takes up again after it broke; it is empty on one that opens a session, and on one for
    jobs, which belong to no session.
    """

    code: ClassVar[int] = 1
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({OPERATIONS, BULK, FUNCTIONS, JOBS})
    versions: list[int]
    role: str
    """`OPERATIONS`, `BULK`, `FUNCTIONS` or `JOBS`."""
    session: str
    software: dict[str, str]
    """Names and versions for people and for checks: "skyproxy", "python", "torch"."""
    grace_seconds: int = 0
    """The time for which the worker shall keep the session when its connection breaks; 0: not at all."""
    secret: bytes = field(default=b"", repr=False)
    """The secret of the `Welcome` which opened the session, where its connection is replaced."""
    received: int = 0
    """Answers that came on the operations connection before it broke."""


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The worker accepts the connection."""

    code: ClassVar[int] = 2
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({OPERATIONS, BULK, FUNCTIONS, JOBS})
    version: int
    session: str
    software: dict[str, str]
    devices: list[dict[str, Any]]
    """One row a device: "type", "index", "name", "total_memory_bytes", ...; the preferred one first."""
    limits: dict[str, int]
    secret: bytes = field(default=b"", repr=False)
    """The proof of who may resume the session; empty where nobody can."""
    received: int = 0
    """The newest batch that came before the connection broke."""


@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """The last message on a connection: why it ends. `code_name` is one of `errors.CLOSE_CODES`."""

    code: ClassVar[int] = 3
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT, WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({OPERATIONS, BULK, FUNCTIONS, JOBS})
    code_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Batch(Message):
    """Commands in order, as one flat list: a signature number, then as many operands as that signature takes.

    The numbers below `protocol.commands.FIRST_SIGNATURE` are built-in commands, the others were defined by an earlier
    `DEFINE` of the same session. `buffers` holds the bytes of small uploads, taken in order.
    """

    code: ClassVar[int] = 4
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    sequence: Sequence
    stream: list[Any]
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class NamedBatch(Message):
    """A batch that will come again: the worker keeps it, decoded, under a number that the client gives it.

    `holes` are the positions in `stream` that differ from time to time; what stands there now is this time's.
    """

    code: ClassVar[int] = 12
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    sequence: Sequence
    stream: list[Any]
    name: int
    holes: list[int]
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat(Message):
    """A batch that came before, by its name, with what stands in its holes otherwise than the last time.

    `changes` has the number of a hole, then what stands there, and so on.
    """

    code: ClassVar[int] = 13
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    sequence: Sequence
    name: int
    changes: list[Any]
    buffers: tuple[Buffer, ...] = ()


BATCHES: tuple[type[Message], ...] = (Batch, NamedBatch, Repeat)
"""The messages that carry commands, and share one numbering."""


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """All batches up to and including `sequence` were executed and will not be asked for again."""

    code: ClassVar[int] = 5
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Reply(Message):
    """The answer to a request."""

    code: ClassVar[int] = 6
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    request: RequestId
    value: Any
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure(Message):
    """The answer to a request that could not be met, or, with request 0, the news that a command failed.

    `error` has "type", "message", "traceback", "op", and where the command stood: "sequence" and "position".
    """

    code: ClassVar[int] = 7
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    request: RequestId
    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Warned(Message):
    """News of a warning that PyTorch gave while a command ran.

    `category` is the name of one of Python's classes of warnings. `place` has "sequence" and "position" of the command,
    and "graph" where the position is in the stream of a captured graph.
    """

    code: ClassVar[int] = 23
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    category: str
    message: str
    place: dict[str, int]


ANSWERS: tuple[type[Message], ...] = (Reply, Failure, Warned)
"""Messages that a worker sends once, and says again after a broken connection: counted on both sides, from 1."""


@dataclass(frozen=True, slots=True)
class Received(Message):
    """The first `count` answers of the session have come, and need not be kept any longer."""

    code: ClassVar[int] = 27
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    count: int


@dataclass(frozen=True, slots=True)
class Chunk(Message):
    """A piece of a large tensor, in either direction: `buffers[0]` belongs at byte `offset` of `total_bytes`.

    `transfer` is the number that the client gave the transfer when it announced it in a batch.
    """

    code: ClassVar[int] = 8
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT, WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    transfer: int
    offset: int
    total_bytes: int
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedChunk(Message):
    """A `Chunk` for slow links: `buffers[0]` unpacks to the `raw_bytes` bytes that belong at `offset`.

    It is raw deflate (RFC 1951) of the shuffled bytes: the first of every `width`, then the second ones, and so on.
    """

    code: ClassVar[int] = 14
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT, WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    transfer: int
    offset: int
    total_bytes: int
    raw_bytes: int
    width: int
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelTransfer(Message):
    """The sender of a transfer gives it up; `reason` is for the error that its readers get."""

    code: ClassVar[int] = 9
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT, WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    transfer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Landed(Message):
    """The first `byte_count` bytes of a transfer have arrived, or it failed and is over: then there are none.

    Only in sessions that outlive their connections.
    """

    code: ClassVar[int] = 28
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT, WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    transfer: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class Continue(Message):
    """The first message on a bulk connection that replaces a broken one.

    `uploads` are those that the client knows no end of: a `Landed` answers each, and says where to go on. `downloads`
    has, for those that the client still waits for, how many bytes it has; the others are over.
    """

    code: ClassVar[int] = 29
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    uploads: list[int]
    downloads: dict[int, int]


@dataclass(frozen=True, slots=True)
class CancelOperations(Message):
    """The worker must begin nothing more of what it has not begun, up to the end of this cancellation.

    The end stands in the stream: a `CALL` of "end_cancellation" with the same `number`. Numbers of a session count up
    from 1; one whose end was met already means nothing any more, so the message may come late, or twice. It goes past
    the operations, on the other connection. Sent only to workers whose `Welcome` has the limit "cancels".
    """

    code: ClassVar[int] = 30
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    number: int


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """Before an upload's first chunk: the worker may keep what comes, for uploads of the same content later on.

    With a `digest` (see `protocol.digests`) it is also a question: the answer is a `Known`, and until it came, no chunk
    leaves. Without one there is no answer. Sent only to workers whose `Welcome` has the limit "blob_bytes".
    """

    code: ClassVar[int] = 20
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    transfer: int
    total_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Known(Message):
    """The answer to an `Offer`: whether the worker had the bytes already. Then it has used them, and none must come."""

    code: ClassVar[int] = 21
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    transfer: int
    known: bool


@dataclass(frozen=True, slots=True)
class Challenge(Message):
    """The answer to an `Offer` of bytes that the worker has from another client: they are for who has them, too.

    The client answers with a `Proof`, and gets its `Known` then.
    """

    code: ClassVar[int] = 25
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    transfer: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Proof(Message):
    """The bytes of an upload, hashed behind the nonce of a `Challenge`; see `protocol.digests`."""

    code: ClassVar[int] = 26
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    transfer: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Asks for a `Pong` with the same number. Answered by a thread that never executes operations."""

    code: ClassVar[int] = 10
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT, WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    number: int


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """The answer to a `Ping`.

    `load` tells what the worker does: "executing", whether it executes a batch, "sequence", which one, the latest if
    none, and "position", where in its stream; -1 where that is not known.
    """

    code: ClassVar[int] = 11
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT, WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({BULK})
    number: int
    load: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobRequest(Message):
    """A question about jobs, or an order: the one message of a client on its connection for jobs.

    One is answered after the other, each by a `JobAnswer` with its number. `action` is one of `JOB_ACTIONS`.
    """

    code: ClassVar[int] = 31
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({JOBS})
    request: RequestId
    action: str
    value: dict[str, object]
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class JobAnswer(Message):
    """The answer to a `JobRequest`.

    `problem` is empty, or one of `JOB_PROBLEMS`: then `value` has "message", for people.
    """

    code: ClassVar[int] = 32
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({JOBS})
    request: RequestId
    problem: str
    value: dict[str, object]
    buffers: tuple[Buffer, ...] = ()


JOB_ACTIONS = frozenset({"begin", "data", "start", "list", "status", "log", "wait", "result", "cancel", "remove"})
"""The actions of a `JobRequest`. "begin", "data" and "start" belong together: a job, its bytes, and its start."""
JOB_PROBLEMS = frozenset({"invalid", "limit", "refused", "unknown"})
"""The problems of a `JobAnswer`. "unknown": there is no job of that name, or it is another client's."""
