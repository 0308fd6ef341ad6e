"""The document of a snapshot: plain data, written as msgpack, and read with suspicion.

Numbers, texts, bytes, lists and tables only. Each part is taken out by a function that says what it may be, so that a
document that somebody has made or cut short is refused where it is read, in words, and before anything has changed.
"""

from __future__ import annotations

from typing import Any

import msgpack

from skyproxy.errors import ProtocolError, SnapshotError
from skyproxy.protocol.framing import COMPLEX_EXTENSION, pack_complex, unpack_plain

Row = list[Any]
"""A list out of a document: of anything."""
Table = dict[Any, Any]
"""A table out of a document."""
FORMAT = 1
"""The version of the format. A worker reads its own and older ones."""
MAX_DOCUMENT_BYTES = 1 << 30
_MAX_LENGTH = 8_000_000
MAX_WHOLE = 1 << 62


def refuse(problem: str) -> SnapshotError:
    """Return the error for a document that no worker has written."""
    return SnapshotError(
        f"this snapshot cannot be used: {problem}. It is damaged, or no worker has written it. Nothing was changed; "
        "load an older one (list_snapshots names them)"
    )


def pack(document: object) -> bytes:
    """Return the bytes of a document."""
    packer = msgpack.Packer(unicode_errors="surrogatepass", default=_unusual)
    data: bytes = packer.pack(document)
    return data


def _unusual(value: object) -> msgpack.ExtType:
    if isinstance(value, complex):
        return msgpack.ExtType(COMPLEX_EXTENSION, pack_complex(value))
    raise SnapshotError(f"this session holds a {type(value).__name__} that no snapshot can hold")


def unpack(data: bytes) -> Table:
    """Return the document in `data`.

    Raises:
        SnapshotError: there is none.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise refuse(f"its document has {len(data):,} bytes, and {MAX_DOCUMENT_BYTES:,} are allowed")
    try:
        document = unpack_plain(data, _MAX_LENGTH)
    except (ProtocolError, ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise refuse(f"its document is not msgpack that we understand ({error})") from error
    return table(document, "the document")


# --- what a part may be ----------------------------------------------------------------------------------------------


def table(value: object, what: str) -> Table:
    """Return a table.

    Raises:
        SnapshotError: it is none.
    """
    if type(value) is not dict:
        raise refuse(f"{what} is {_describe_value(value)} and should be a table")
    return value


def entry(document: Table, name: str) -> object:
    """Return what stands under a name.

    Raises:
        SnapshotError: nothing does.
    """
    try:
        return document[name]
    except KeyError:
        raise refuse(f"it has no {name!r}") from None


def whole_number(value: object, what: str, most: int = MAX_WHOLE, least: int = 0) -> int:
    """Return a whole number from `least` to `most`.

    Raises:
        SnapshotError: it is none.
    """
    if type(value) is not int or not least <= value <= most:
        raise refuse(f"{what} is {_describe_value(value)} and should be a number from {least} to {most}")
    return value


def whole_numbers(value: object, what: str, most: int = MAX_WHOLE, least: int = 0) -> list[int]:
    """Return a list of such numbers."""
    return [whole_number(item, what, most, least) for item in rows(value, what)]


def real(value: object, what: str) -> float:
    """Return a number that may have a fraction."""
    if type(value) not in (int, float):
        raise refuse(f"{what} is {_describe_value(value)} and should be a number")
    return float(value)  # type: ignore[arg-type]


def flag(value: object, what: str) -> bool:
    """Return a truth value."""
    if type(value) is not bool:
        raise refuse(f"{what} is {_describe_value(value)} and should be true or false")
    return value


def text(value: object, what: str, most: int = 1 << 20) -> str:
    """Return a text of up to `most` characters."""
    if type(value) is not str or len(value) > most:
        raise refuse(f"{what} is {_describe_value(value)} and should be a text of up to {most} characters")
    return value


def data(value: object, what: str, most: int = 1 << 20) -> bytes:
    """Return up to `most` bytes."""
    if type(value) is not bytes or len(value) > most:
        raise refuse(f"{what} is {_describe_value(value)} and should be up to {most} bytes")
    return value


def rows(value: object, what: str, width: int | None = None) -> Row:
    """Return a list; with a width, of lists of that length."""
    if type(value) is not list:
        raise refuse(f"{what} is {_describe_value(value)} and should be a list")
    if width is not None and not all(type(row) is list and len(row) == width for row in value):
        raise refuse(f"{what} should be a list of lists of {width}")
    return value


def _describe_value(value: object) -> str:
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:60]
