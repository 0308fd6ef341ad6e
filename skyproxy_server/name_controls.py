"""Requests of clients about named sessions, and the values in them."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgpack
import torch

from skyproxy import torch_codec
from skyproxy.errors import ConfigurationError, ProtocolError
from skyproxy_server.controls import CONTROLS
from skyproxy_server.gates import storage_key
from skyproxy_server.named_errors import (
    NamedSessionChangedError,
    NamedSessionElsewhereError,
    NamedSessionInUseError,
    NamedSessionMovedError,
)
from skyproxy_server.named_sessions import NamedSession, NamedSessions, NamedValueRequests, StoredValue
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.claims import claimed, ended_elsewhere, left_elsewhere, rows_elsewhere
from skyproxy_server.sparse_indices import with_own_indices

_MOST_CHARACTERS = 200
_MOST_ADDRESS_CHARACTERS = 2000
_NONE_HERE = (
    "this worker has a process for each session, and no place where a named one could be saved when its process ends. "
    "Start it with --snapshots DIR; or with --sessions-in-process, where they are kept in its memory"
)


def _names(session: SessionState) -> NamedValueRequests:
    if session.names is None:
        raise ConfigurationError(_NONE_HERE)
    return session.names


def _find_session(session: SessionState) -> tuple[NamedSessions, NamedSession]:
    names = _names(session)
    if names.held is None:
        raise ProtocolError("this session has no name")
    return names.store, names.held


def _text(name: object) -> str:
    if type(name) is not str or not 0 < len(name) <= _MOST_CHARACTERS:
        raise ProtocolError(f"a name is a text of 1 to {_MOST_CHARACTERS} characters")
    return name


def hold_named(session: SessionState, name: str, take: bool) -> dict[str, object]:
    """Use the named session; "held_seconds" where another client has it, with "elsewhere" where that is one of another
    worker of the same volume, "moved" where it went to another worker, "refused" where this worker has none.
    """
    if session.names is None:
        return {"refused": _NONE_HERE}
    names = session.names
    if names.held is not None:
        raise ProtocolError("this session already has a name")
    try:
        # Idle: who has it may be executing, under other modes of PyTorch.
        with session.idle(), claimed(session, _text(name), takes=bool(take)):
            names.held = _restore_saved(session, names, _text(name), takes=bool(take))
            if names.held is None:
                names.held = names.store.hold(names.holder, names.owner, name, take=bool(take))
    except NamedSessionInUseError as error:
        return {"held_seconds": error.seconds}
    except NamedSessionElsewhereError as error:
        return {"held_seconds": error.seconds, **({} if error.is_here else {"elsewhere": error.where})}
    except NamedSessionMovedError as error:
        return {"moved": error.where}
    return {}


def _restore_saved(session: SessionState, names: NamedValueRequests, name: str, *, takes: bool) -> NamedSession | None:
    """Return what a worker before this one has saved of a named session, brought back; None where nothing was.

    Raises:
        NamedSessionInUseError: it is of a program that may go on from there, and is not to be taken.
    """
    if session.snapshots is None or names.store.has(names.owner, name):
        return None
    row = session.snapshots.saved_session(name)
    if row is None:
        return None
    if row.is_held and not takes:
        if names.store.has_moved(names.owner, name):
            return None
        raise NamedSessionInUseError(row.age_seconds)
    place = row.place
    saved = session.snapshots.read_named(session, place)
    saved.tag = secrets.token_hex(16)  # whoever used it then has lost it
    try:
        names.store.bring_back(names.holder, saved)
    except NamedSessionChangedError:
        return None  # another client was faster
    session.snapshots.delete(place, "")
    return saved


def put_named(session: SessionState, key: str, document: bytes, slots: list[int]) -> list[int]:
    """Keep values under a name; the numbers by which their tensors are known."""
    store, held = _find_session(session)
    tensors = [session.values.get(slot, writes=True) for slot in slots]
    if type(document) is not bytes or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ProtocolError("a name stands for a document and tensors")
    return store.put(held, _text(key), document, tensors)


def named_value(session: SessionState, key: str) -> dict[str, object]:
    """Return what stands under a name: its document, and a row for each of its tensors; or "names", if nothing does."""
    _, held = _find_session(session)
    value = held.values.get(_text(key))
    if value is None:
        return {"names": sorted(held.values)}
    return {"version": value.version, "document": value.document, "rows": msgpack.packb(_rows(held, value))}


def _rows(held: NamedSession, value: StoredValue) -> list[list[object]]:
    """For each tensor: its number, what it looks like, its device, the size of its storage, the numbers of all that
    share that.
    """
    kin: dict[int, list[int]] = {}
    everything = {id(tensor): tensor for other in list(held.values.values()) for tensor in other.tensors}
    for tensor in everything.values():
        key = storage_key(tensor)
        if key is not None:
            kin.setdefault(key, []).append(held.number_of(tensor))
    rows: list[list[object]] = []
    for tensor in value.tensors:
        key = storage_key(tensor)
        rows.append(
            [
                held.number_of(tensor),
                torch_codec.encode_description(torch_codec.describe(tensor)),
                [tensor.device.type, tensor.device.index or 0],
                tensor.untyped_storage().nbytes() if key is not None else 0,
                kin[key] if key is not None else [],
            ]
        )
    return rows


def adopt_named(session: SessionState, key: str, version: int, slots: list[int]) -> bool:
    """The tensors of a named value become values of this session; slot 0 leaves one out. False if it has changed."""
    _, held = _find_session(session)
    value = held.values.get(_text(key))
    if value is None or value.version != version or len(value.tensors) != len(slots):
        return False
    for slot, tensor in zip(slots, value.tensors, strict=True):
        if slot:
            if tensor.is_cuda:
                # Another session's stream has written it, and the allocator must not give it away while ours reads it.
                torch.cuda.synchronize(tensor.device)
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            session.values.gates.note_memory(tensor)
            session.values.slots[slot] = with_own_indices(tensor)
    return True


def list_named(session: SessionState) -> list[list[object]]:
    """For each name: how many tensors it has, their bytes, its age in seconds."""
    store, held = _find_session(session)
    return store.value_rows(held)


def forget_named(session: SessionState, key: str) -> bool:
    """Let go of a name; whether there was one."""
    store, held = _find_session(session)
    return store.forget(held, _text(key))


def named_sessions(session: SessionState) -> list[dict[str, object]]:
    """The named sessions of this client's token: those in memory, and what was saved of others."""
    names = _names(session)
    rows = names.store.rows(names.owner)
    if session.snapshots is None:
        return rows
    with session.idle():  # waiting for the disk computes nothing
        saved = session.snapshots.saved_sessions()
        known = {row["name"] for row in rows}
        rows += [row for row in rows_elsewhere(session) if row["name"] not in known]
    known = {row["name"] for row in rows}
    return rows + [
        {
            "name": one.name,
            "names": one.names,
            "bytes": one.byte_count,
            "age_seconds": one.age_seconds,
            "held": one.is_held,
            "saved": True,
            "expires_in_seconds": one.expires_in_seconds,
        }
        for one in saved
        if one.name not in known
    ]


def end_named(session: SessionState, name: str) -> bool:
    """End a named session of this client's token; whether there was one."""
    names = _names(session)
    _text(name)
    with session.idle():
        was_here = names.store.end(names.owner, name)
        was_there = not was_here and ended_elsewhere(session, name)
        was_saved = session.snapshots is not None and session.snapshots.delete_saved(name)
        return was_here or was_there or was_saved


def leave_named(session: SessionState, name: str, used_by: str, where: str) -> bool:
    """Forget a named session that goes on at another worker, at an address; whether it was that of `used_by`."""
    names = _names(session)
    if type(used_by) is not str or type(where) is not str or len(where) > _MOST_ADDRESS_CHARACTERS:
        raise ProtocolError("a session leaves for an address")
    if names.store.leave(names.owner, _text(name), used_by, where):
        return True
    with session.idle():
        return left_elsewhere(session, name, used_by, where)


def install() -> None:
    """Make these controls known."""
    functions: list[Callable[..., object]] = [hold_named, put_named, named_value, adopt_named, list_named, forget_named]
    functions += [named_sessions, end_named, leave_named]
    CONTROLS.update({function.__name__: function for function in functions})
