"""Names, structures and tensors of what a saved session holds.

Loaded with the first session that is saved or restored: a program's first value does without.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import msgpack

from skyproxy import torch_modes
from skyproxy.errors import ConfigurationError, ProtocolError, SnapshotError, visible
from skyproxy.interrupts import raised_by_handler
from skyproxy.loading.node_names import checked_name, open_document
from skyproxy.payloads.tensors import REFERENCE
from skyproxy.snapshots.documents import data, entry, refuse, rows, table, text, unpack, whole_numbers
from skyproxy.snapshots.folder import MAX_NAMES_BYTES, check_name
from skyproxy.snapshots.stores import FileStore
from skyproxy.tensor.core.remote_tensor import RemoteTensor

_ON_WORKER = "worker:"
Location = str | os.PathLike[str]


class SavedValue(NamedTuple):
    """A value that is to be saved, or was.

    Attributes:
        document: its structure.
        slots: of its tensors, in the order of its references.
    """

    document: bytes
    slots: list[int]


def name_on_worker(location: Location) -> str:
    """Return the name of a place on the worker's own volume; an empty text for every other place."""
    if isinstance(location, str) and location.startswith(_ON_WORKER):
        return check_name(location.removeprefix(_ON_WORKER))
    if not os.fspath(location):
        raise ConfigurationError(f'{location!r:.80} is no place to save to. Use a folder, or "worker:NAME".')
    return ""


def slots_of(tensors: list[Any]) -> list[int]:
    """Return the slots of remote tensors."""
    slots: list[int] = []
    for tensor in tensors:
        assert isinstance(tensor, RemoteTensor)
        slots.append(tensor._sky.slot)
    return slots


def pack_names(saved: Mapping[str, SavedValue]) -> bytes:
    """Return values and the modes in force as a snapshot holds them.

    Raises:
        ConfigurationError: they are too large.
    """
    modes = dict(torch_modes.record_of(torch_modes.values_in_force()))
    packed: bytes = msgpack.packb({"values": {name: list(value) for name, value in saved.items()}, "modes": modes})
    if len(packed) > MAX_NAMES_BYTES:
        raise ConfigurationError(
            f"what is not on the worker takes {len(packed):,} bytes, and {MAX_NAMES_BYTES:,} can be saved. Move "
            "tensors of the CPU to the worker first"
        )
    return packed


def read_names(packed: object) -> tuple[dict[str, SavedValue], torch_modes.Record]:
    """The values that are named in a snapshot, and the modes; nothing in it is believed.

    Raises:
        SnapshotError: there are none.
    """
    content = data(packed, "its names", MAX_NAMES_BYTES)
    if not content:
        raise SnapshotError(
            "this snapshot has no names: it was taken to protect a session, and is of use to that one only. Save with "
            "node.save. Nothing was changed"
        )
    plain = unpack(content)
    saved: dict[str, SavedValue] = {}
    for name, value in table(entry(plain, "values"), "its values").items():
        document, slots = value if type(value) is list and len(value) == 2 else (None, None)
        saved[checked_name(text(name, "a name", 200))] = SavedValue(
            data(document, "a document", MAX_NAMES_BYTES),
            whole_numbers(rows(slots, "its tensors"), "a tensor", 1 << 53),
        )
    try:
        modes = torch_modes.decode(entry(plain, "modes"), cuda=True)
    except (ProtocolError, ConfigurationError) as error:
        raise SnapshotError(f"this snapshot needs other modes than this PyTorch has: {error}") from error
    return saved, modes


def looks_of(name: str, value: SavedValue, there: Container[int]) -> list[Any]:
    """Return how the tensors of a saved value look, in the order of its slots.

    Args:
        name: of the value.
        value: what was saved.
        there: the slots that the snapshot has.

    Raises:
        SnapshotError: these are not the tensors that were saved.
    """
    looks = [row for row in _tables(name, value.document)["tensors"] if row[0] == REFERENCE]
    if len(looks) != len(value.slots) or not all(slot in there for slot in value.slots):
        raise refuse(f"{name!r:.80} has other tensors than were saved with it")
    return looks


def _tables(name: str, document: bytes) -> dict[str, Any]:
    try:
        _, tables, _ = open_document(document)
        looks = tables["tensors"]
        if type(looks) is not list or not all(type(row) is list and row for row in looks):
            raise TypeError("its tensors are none")
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        if raised_by_handler(error):
            raise
        raise refuse(f"the structure of {visible(repr(name)):.80} is malformed ({error!r:.80})") from error
    return tables


def unwritable(store: FileStore, error: OSError) -> SnapshotError:
    """Return the error for a place that cannot be written."""
    return SnapshotError(
        f"{store} cannot be written: {error.strerror or error}. What was saved there before is untouched, and the "
        "session goes on. Make room, or save elsewhere"
    )
