"""The file in which the process of a function job leaves its result: written there, read by a client."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgpack
import torch

from skyproxy.errors import (
    ProtocolError,
    RemoteFunctionError,
    RemoteTraceback,
    UntrustedResultError,
    traceback_text,
    visible,
)
from skyproxy.payloads.pickling import PLAIN, Pickled, Pickler, Unpickler
from skyproxy.payloads.pieces import flat_size
from skyproxy.payloads.plain import NotPlainError
from skyproxy.payloads.plain_reading import from_plain
from skyproxy.payloads.plain_writing import to_plain
from skyproxy.payloads.rebuilding import UnknownClassError
from skyproxy.payloads.tensors import Row, memory_for
from skyproxy.payloads.unpicklable import first_unpicklable

Tables = dict[str, Any]
"""The tables that travel beside the pieces of a payload."""
RESULT = "result"
_HEAD = struct.Struct("<Q")
_MAX_HEAD_BYTES = 256 << 20


def write_result(folder: Path, value: object, *, plain: bool) -> None:
    """Write what a function returned; tensors by value.

    Raises:
        TypeError: something in it cannot be pickled.
    """
    try:
        pickled = _pickle(value, plain=plain)
    except Exception as error:  # whatever its class raised
        place = first_unpicklable({"result": value}, lambda part: _pickle(part, plain=plain))
        raise TypeError(
            f"the result of the job cannot be sent back: a {type(value).__qualname__} cannot be pickled "
            f"({_text(error)}, in {place}). Return what can, or write it to a file that stays."
        ) from error
    _write(folder, {"kind": "result"}, pickled)


def write_error(folder: Path, error: BaseException, *, plain: bool) -> None:
    """Write what a function raised: in words, and itself where it can be written."""
    words = {
        "kind": "error",
        "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "message": _text(error),
        "traceback": traceback_text(error),
    }
    pickled: Pickled | None = None
    try:
        pickled = to_plain(error, lambda tensor: None) if plain else Pickler(lambda tensor: None).pickle(error)
    except Exception:  # whatever it holds; the words remain
        pickled = None
    _write(folder, words, pickled)


def _pickle(value: object, *, plain: bool) -> Pickled:
    if not plain:
        return Pickler(lambda tensor: None).pickle(value)
    try:
        return to_plain(value, lambda tensor: None)
    except NotPlainError as error:
        # As a pickle, and it says so: the client may come to trust us.
        pickled = Pickler(lambda tensor: None).pickle(value)
        pickled.not_plain = error.what
        return pickled


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _write(folder: Path, words: Tables, pickled: Pickled | None) -> None:
    pieces = pickled.pieces if pickled is not None else []
    tables = pickled.tables if pickled is not None else {}
    head = msgpack.packb({**words, "tables": tables, "sizes": [flat_size(piece) for piece in pieces]})
    partial = folder / f"{RESULT}.partial"
    with open(partial, "wb") as file:
        file.write(_HEAD.pack(len(head)))
        file.write(head)
        for piece in pieces:
            file.write(memoryview(piece).cast("B"))
    os.replace(partial, folder / RESULT)


# --- on the client ----------------------------------------------------------------------------------------------------


def read_result(content: bytes, name: str, *, trusted: bool) -> Any:
    """Return the value in such a file.

    Args:
        content: of the file, which the worker may have made up.
        name: of the job.
        trusted: whether it may be a pickle, which runs code of the worker's choice here.

    Raises:
        UntrustedResultError: it is one, and may not be; or has an object of a class that this program has not loaded.
        ProtocolError: it is no such file.
        Exception: what the function raised.
    """
    try:
        (size,) = _HEAD.unpack_from(content)
        if size > _MAX_HEAD_BYTES:
            raise ValueError("its head is too large")
        head = msgpack.unpackb(content[_HEAD.size : _HEAD.size + size], strict_map_key=False)
        tables, pieces = _tables(head), _pieces(memoryview(content)[_HEAD.size + size :], head)
    except (struct.error, ValueError, TypeError, KeyError, LookupError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the worker sent no result of job {name}: {error!r:.200}") from error
    if head["kind"] == "error":
        _raise(head, tables, pieces, name, trusted=trusted)
    return _value(tables, pieces, name, trusted=trusted)


def _tables(head: Tables) -> Tables:
    tables = head["tables"]
    if head["kind"] not in ("result", "error") or type(tables) is not dict:
        raise ValueError("neither a result nor an error")
    tables = {"tensors": [], "bases": [], "form": "", **tables}
    rows, bases = tables["tensors"], tables["bases"]
    if type(rows) is not list or type(bases) is not list or {type(row) for row in rows} - {list}:
        raise ValueError("its tables are none")
    if {type(base) for base in bases} - {int}:
        raise ValueError("its tables are none")
    return tables


def _pieces(content: memoryview, head: Tables) -> list[object]:
    sizes = head["sizes"]
    if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != len(content):
        raise ValueError("its pieces are not those that it names")
    allocate = memory_for({"bases": head["tables"].get("bases", [])}, len(sizes))
    pieces, offset = [], 0
    for index, size in enumerate(sizes):
        piece, view = allocate(index, size)
        view[:] = content[offset : offset + size]
        offset += size
        pieces.append(piece)
    return pieces


def _value(tables: Tables, pieces: Sequence[object], name: str, *, trusted: bool) -> Any:
    refused = f"the job {name} returned %s, and its worker is not trusted with more than plain data"
    with torch.inference_mode(False), torch.no_grad():
        if tables["form"] == PLAIN:
            try:
                return from_plain(pieces, tables, _no_reference)
            except UnknownClassError as error:
                what = f"an object of {visible(error)}, which this program does not have"
                raise UntrustedResultError(refused % what) from error
        if not trusted:
            what = visible(tables.get("not_plain") or "a pickle")
            raise UntrustedResultError(
                refused % what + ". Return such data; or, if you would let that worker run any code here, connect with "
                "skyproxy.connect(url, trust_worker=True) and ask again: node.job(name).result()"
            )
        return Unpickler(pieces, tables, _no_reference).unpickle()


def _no_reference(row: Row, position: int) -> torch.Tensor:
    raise ProtocolError("the result of a job has no tensors that stay on the worker")


def _raise(words: Tables, tables: Tables, pieces: Sequence[object], name: str, *, trusted: bool) -> NoReturn:
    kind, message, trace = (visible(words.get(key) or "") for key in ("type", "message", "traceback"))
    error: object = None
    if pieces:
        try:
            error = _value(tables, pieces, name, trusted=trusted)
        except Exception:  # the words remain
            error = None
    if not isinstance(error, Exception):
        error = RemoteFunctionError(f"{kind}: {message}")
        error.remote_traceback = trace
    error.add_note(f"raised by the job {name} on its worker; its traceback there is above")
    raise error from RemoteTraceback(trace)
