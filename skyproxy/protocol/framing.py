"""Message <-> frame.

A frame is one byte of message code, the header's length as an unsigned little-endian 32-bit number, the header, and
the raw bytes of the message's buffers, back to back. The header is one msgpack array of the message's fields; where
the message has buffers, the list of their lengths stands in their place. Tensor bytes never pass through msgpack.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from skyproxy.errors import ConfigurationError, LimitExceededError, ProtocolError
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import Buffer, Message

PREFIX = struct.Struct("<BI")
PREFIX_BYTES = PREFIX.size
COMPLEX_EXTENSION = 1
"""The one msgpack extension we use: a Python complex as two float64, for scalars of ops."""

_COMPLEX = struct.Struct("<dd")
_MAX_CONTAINERS = 1_000_000
"""Lists and tables in one header."""
_MAX_LENGTH = 4_000_000
"""Elements that one of them may announce: memory for them is taken before the first one comes."""
_CONTAINERS = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))


class _Layout:
    """The layout of one message class on the wire: its fields in order, and the check that each passes on arrival."""

    __slots__ = ("checks", "count", "defaults", "has_buffers", "kinds", "message_type", "names", "values")

    def __init__(self, message_type: type[Message]) -> None:
        names = [item.name for item in fields(message_type)]
        hints = get_type_hints(message_type)
        self.message_type: Callable[..., Message] = message_type
        self.has_buffers = "buffers" in names
        if self.has_buffers:
            last = names.pop()  # not inside the assertion, which `python -O` removes
            assert last == "buffers", "buffers travel behind the other fields"
        self.names = names
        self.count = len(names) + self.has_buffers
        # Trailing fields with a default need not travel: they were added later, and the peer may not know them.
        defaults = [item.default for item in fields(message_type) if item.default is not MISSING]
        self.defaults: tuple[object, ...] = () if self.has_buffers else tuple(defaults)
        # Most fields are of one type, which is compared in place: calling a check for each takes longer than all else.
        self.kinds = [_kind_of(hints[name]) for name in names]
        self.checks = [None if kind is not None else _check_for(hints[name]) for name, kind in zip(names, self.kinds)]
        getter = attrgetter(*names)
        self.values: Callable[[Message], tuple[object, ...]] = getter if len(names) > 1 else lambda m: (getter(m),)


def _kind_of(annotation: object) -> type | None:
    """The one type that a decoded value must have; None where that is not all that is asked for."""
    annotation = getattr(annotation, "__supertype__", annotation)
    return annotation if isinstance(annotation, type) and annotation not in (object, Any) else None


def _check_for(annotation: object) -> Callable[[Any], bool] | None:
    """The test that a decoded value has the type that `annotation` asks for; None where anything goes."""
    annotation = getattr(annotation, "__supertype__", annotation)
    if annotation is Any or annotation is object:
        return None
    origin = get_origin(annotation)
    if origin is None:
        # `is`, because msgpack makes no subclasses, and a bool must not pass for an int.
        return lambda value: type(value) is annotation
    plain = [_kind_of(item) for item in get_args(annotation)]
    first = frozenset(plain[:1])
    if origin is list and plain[0] is not None:
        return lambda value: type(value) is list and first.issuperset(map(type, value))
    if origin is dict and plain[0] is not None and get_args(annotation)[1] is Any:
        return lambda value: type(value) is dict and first.issuperset(map(type, value))
    checks = [_check_for(item) or (lambda value: True) for item in get_args(annotation)]
    if origin is list:
        if get_args(annotation) == (Any,):
            return lambda value: type(value) is list
        return lambda value: type(value) is list and all(map(checks[0], value))
    assert origin is dict, f"no check for {annotation}"
    return lambda value: type(value) is dict and all(map(checks[0], value)) and all(map(checks[1], value.values()))


_LAYOUTS = {code: _Layout(cls) for code, cls in MESSAGES.items()}
_LAYOUT_OF_TYPE = {cls: _LAYOUTS[code] for code, cls in MESSAGES.items()}


class _Packers(threading.local):
    """One packer a thread: a packer has a buffer of its own and may not be shared."""

    def __init__(self) -> None:
        # Lone surrogates occur in file names of tracebacks; a report about a failure must not fail because of them.
        self.pack = msgpack.Packer(unicode_errors="surrogatepass").pack


_PACKERS = _Packers()


def prepare_thread() -> None:
    """Make the calling thread's packer now, where `encode` would with its first message."""
    _PACKERS.__dict__.get("pack")


def encode(message: Message, max_frame_bytes: int) -> list[Buffer]:
    """The frame of a message.

    Args:
        message: any message of `protocol.messages`.
        max_frame_bytes: the largest frame that the peer accepts.

    Returns:
        The prefix and header as one piece, then the message's own buffers, neither copied nor split.

    Raises:
        ConfigurationError: a field holds an integer beyond 64 bits, or something msgpack has no form for.
        LimitExceededError: the frame would be larger than `max_frame_bytes`.
    """
    layout = _LAYOUT_OF_TYPE[type(message)]
    values = layout.values(message)
    buffers: list[Buffer] = []
    size = PREFIX_BYTES
    if layout.has_buffers:
        if message.buffers:  # type: ignore[attr-defined]
            buffers = [_flat(item) for item in message.buffers]  # type: ignore[attr-defined]
            lengths = [len(item) for item in buffers]
            values += (lengths,)
            size += sum(lengths)
        else:
            values += ((),)
    elif layout.defaults and values[-len(layout.defaults) :] == layout.defaults:
        values = values[: -len(layout.defaults)]
    try:
        header = _PACKERS.pack(values)
    except (TypeError, OverflowError) as error:
        if raised_by_handler(error):
            raise
        header = _encode_unusual(message, values)
    size += len(header)
    if size > max_frame_bytes:
        raise LimitExceededError(
            f"{type(message).__name__} needs a frame of {size:,} bytes, and the limit is {max_frame_bytes:,}. "
            "Send it in pieces, or raise SKYPROXY_MAX_FRAME_BYTES on both sides."
        )
    return [PREFIX.pack(message.code, len(header)) + header, *buffers]


def _flat(buffer: Buffer) -> Buffer:
    """`buffer` as a run of bytes whose `len` is its size, without a copy."""
    if type(buffer) is memoryview and (buffer.ndim != 1 or buffer.itemsize != 1):
        return buffer.cast("B")
    return buffer


def _encode_unusual(message: Message, values: tuple[object, ...]) -> bytes:
    """The header of a message with complex numbers, or the reason why it has none.

    Apart from the common path, because a packer with a Python callback is slower and reports large integers worse.
    """

    def convert(value: object) -> msgpack.ExtType:
        if isinstance(value, complex):
            return msgpack.ExtType(COMPLEX_EXTENSION, pack_complex(value))
        name = type(message).__name__
        if isinstance(value, int):
            raise ConfigurationError(
                f"{name} holds the integer {_shorten(value)}, which does not fit into 64 bits. "
                "Use a float, or a value between -2**63 and 2**64-1."
            )
        raise ConfigurationError(
            f"{name} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent. "
            "Use None, bool, int, float, complex, str, bytes, list, tuple or dict."
        )

    header: bytes = msgpack.Packer(unicode_errors="surrogatepass", default=convert).pack(values)
    return header


def _shorten(value: int) -> str:
    # Python refuses to print integers of more than 4300 digits.
    return str(value) if abs(value) < 10**40 else f"of {value.bit_length()} bits"


class DecodedHead:
    """A message whose buffers are still to come.

    Attributes:
        buffer_lengths: the sizes of its buffers, in order.
        header_bytes: where in the frame the first of them begins.
        frame_bytes: the size of the whole frame.
    """

    __slots__ = ("_layout", "_values", "buffer_lengths", "frame_bytes", "header_bytes")

    def __init__(self, layout: _Layout, values: list[object], lengths: list[int], header_bytes: int) -> None:
        self._layout = layout
        self._values = values
        self.buffer_lengths = lengths
        self.header_bytes = header_bytes
        self.frame_bytes = header_bytes + sum(lengths)

    def complete(self, buffers: Iterable[Buffer] = ()) -> Message:
        """The message with these buffers."""
        if self._layout.has_buffers:
            return self._layout.message_type(*self._values, tuple(buffers))
        return self._layout.message_type(*self._values)


def header_size(prefix: Buffer, max_frame_bytes: int) -> int:
    """Return how many bytes of a frame `decode_head` needs, told from its first `PREFIX_BYTES`.

    Raises:
        ProtocolError: no message has this code, or the frame would be larger than `max_frame_bytes`.
    """
    code: int
    length: int
    code, length = PREFIX.unpack_from(prefix)
    if code not in _LAYOUTS:
        raise ProtocolError(f"No message has the code {code}.")
    if PREFIX_BYTES + length > max_frame_bytes:
        name = MESSAGES[code].__name__
        raise ProtocolError(f"{name} announces a header of {length:,} bytes; the limit is {max_frame_bytes:,} a frame.")
    return PREFIX_BYTES + length


def decode_head(start: Buffer, max_frame_bytes: int) -> DecodedHead:
    """Reads all of a frame but its buffers.

    Args:
        start: the frame's first bytes, as many as `header_size` asks for or more.
        max_frame_bytes: the largest frame that we accept.

    Raises:
        ProtocolError: what is wrong with them.
    """
    try:
        code, length = PREFIX.unpack_from(start)
        layout = _LAYOUTS[code]
    except struct.error:
        raise ProtocolError(f"A frame of {len(start)} bytes is too short; {PREFIX_BYTES} is the least.") from None
    except KeyError:
        raise ProtocolError(f"No message has the code {start[0]}.") from None
    end = PREFIX_BYTES + length
    if end > len(start):
        raise _error(layout, f"the header should have {length:,} bytes, but the frame ends before")
    values = _unpack(layout, start[PREFIX_BYTES:end])
    lengths: list[int] = []
    if layout.has_buffers:
        lengths = values.pop()
        if type(lengths) is not list or (lengths and (set(map(type, lengths)) != {int} or min(lengths) < 0)):
            raise _error(layout, f"the lengths of the buffers are {lengths!r:.100}")
    for index, (kind, check, value) in enumerate(zip(layout.kinds, layout.checks, values, strict=True)):
        if (kind is not None and type(value) is not kind) or (check is not None and not check(value)):
            name, came = layout.names[index], type(value).__name__
            hint = get_type_hints(layout.message_type)[name]
            wanted = getattr(hint, "__supertype__", hint)
            wanted = wanted.__name__ if get_origin(wanted) is None else wanted
            raise _error(layout, f"its {name} should be {wanted}, and what came as {came} is not")
    head = DecodedHead(layout, values, lengths, end)
    if head.frame_bytes > max_frame_bytes:
        raise _error(layout, f"the frame has {head.frame_bytes:,} bytes; the limit is {max_frame_bytes:,}")
    return head


def decode(frame: Buffer, max_frame_bytes: int) -> Message:
    """The message that a whole frame holds.

    Args:
        frame: exactly one frame.
        max_frame_bytes: the largest frame that we accept.

    Returns:
        The message; its buffers are views into `frame`.

    Raises:
        ProtocolError: what is wrong with the frame.
    """
    head = decode_head(frame, max_frame_bytes)
    size = len(frame)
    if head.frame_bytes != size:
        raise _error(head._layout, f"the frame has {size:,} bytes, but its parts add up to {head.frame_bytes:,}")
    if not head.buffer_lengths:
        return head.complete()
    view = memoryview(frame)
    return head.complete(split(view[head.header_bytes :], head.buffer_lengths))


def split(view: memoryview, lengths: Iterable[int]) -> list[memoryview]:
    """Consecutive pieces of `view` with these lengths."""
    pieces = []
    start = 0
    for length in lengths:
        pieces.append(view[start : start + length])
        start += length
    return pieces


class _ContainerCounter:
    """Counts lists and tables while a header is read, each as it is complete, and ends the reading at the bound."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        self.left = _MAX_CONTAINERS

    def __call__(self, container: object) -> object:
        self.left -= 1
        if self.left < 0:
            raise _error(self.layout, f"its header holds more than {_MAX_CONTAINERS:,} lists and tables")
        return container


def _counter_for(layout: _Layout, header: Buffer) -> _ContainerCounter | None:
    """Return what counts the lists of a header that may have too many; None where it plainly has not.

    Each list costs a byte on the wire and sixty in memory, and the collector walks over all of them.
    """
    if len(header) <= _MAX_CONTAINERS:
        return None
    # Bytes that begin a list or a table wherever one can begin: never fewer than there are. In a command with millions
    # of slots, bytes of numbers look like them, too.
    if len(header) - len(bytes(header).translate(None, _CONTAINERS)) > _MAX_CONTAINERS:
        return _ContainerCounter(layout)
    return None


def _unpack(layout: _Layout, header: Buffer) -> list[Any]:
    try:
        values = unpack_plain(header, _MAX_LENGTH, _counter_for(layout, header))
    except ProtocolError:
        raise
    except Exception as exc:  # msgpack's errors share no base class below Exception
        reason = str(exc) or type(exc).__name__
        raise _error(layout, f"its header is not msgpack that we understand ({reason})") from exc
    if type(values) is not list:
        raise _error(layout, f"its header is a {type(values).__name__}, not a list of fields")
    if layout.defaults and len(values) == layout.count - len(layout.defaults):
        values += layout.defaults
    if len(values) != layout.count:
        raise _error(layout, f"it came with {len(values)} fields and has {layout.count}")
    return values


def pack_complex(value: complex) -> bytes:
    """Return the data of the extension that stands for a complex."""
    return _COMPLEX.pack(value.real, value.imag)


def unpack_plain(data: Buffer, max_length: int, count: Callable[[object], object] | None = None) -> object:
    """Return the msgpack of a peer, or of a file, as plain values and complex numbers.

    Args:
        data: the bytes.
        max_length: the most items of one list or table.
        count: is called with each list and table once it is read, and gives what stands for it.

    Raises:
        ProtocolError: it has an extension that is not known.
        Exception: it is not msgpack; its errors share no base class below this.
    """
    value: object = msgpack.unpackb(
        data,
        max_array_len=max_length,
        max_map_len=max_length,
        ext_hook=_read_extension,
        list_hook=count,
        object_hook=count,
        # Timestamps cannot be switched off; as floats they at least bring no type of their own.
        timestamp=1,
        strict_map_key=False,
        unicode_errors="surrogatepass",
    )
    return value


def _read_extension(code: int, data: bytes) -> complex:
    """Return the complex that an extension stands for.

    Raises:
        ProtocolError: it is another extension, or malformed.
    """
    if code != COMPLEX_EXTENSION or len(data) != _COMPLEX.size:
        raise ProtocolError(f"No msgpack extension {code} of {len(data)} bytes is known.")
    return complex(*_COMPLEX.unpack(data))


def _error(layout: _Layout, problem: str) -> ProtocolError:
    return ProtocolError(f"Malformed {getattr(layout.message_type, '__name__', 'message')}: {problem}.")
