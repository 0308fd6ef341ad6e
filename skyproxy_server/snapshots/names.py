"""The named session that a session uses, as a part of its snapshot: with it, what was put under names comes back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyproxy.errors import LimitExceededError, SnapshotError
from skyproxy.snapshots.documents import Row, Table, data, entry, real, refuse, rows, table, text, whole_number
from skyproxy_server.named_errors import NamedSessionChangedError, NamedSessionElsewhereError
from skyproxy_server.named_sessions import NamedSession, NamedValueRequests, StoredValue
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.claims import claimed

_MOST_CHARACTERS = 200
_MOST_NUMBER = 1 << 53


def named_part(names: NamedValueRequests | None, number_of: Callable[[object], int]) -> Table:
    """Return the entry of a document for a session that uses a named one; for any other, none.

    Args:
        names: the named sessions, as the session finds them.
        number_of: gives the number of a value's row.
    """
    held = names.held if names is not None else None
    if names is None or held is None:
        return {}
    ages = {str(key): age for key, _, _, age in names.store.value_rows(held)}
    values = [
        [key, value.version, value.document, [[number_of(t), held.number_of(t)] for t in value.tensors], ages[key]]
        for key, value in held.values.items()
    ]
    # A program that is about to leave comes back as a later one does; any other may go on from here at any moment.
    is_held = not names.holder.is_leaving
    return {"named": {"name": held.name, "tag": held.tag, "count": held.count, "values": values, "held": is_held}}


def read_named(state: SessionState, document: Table, value_at: Callable[[object], object]) -> NamedSession | None:
    """Check what a document says of a named session, and make that; None where it says nothing.

    Args:
        state: the session that will use it; it uses none.
        document: not believed.
        value_at: gives the value of a row.

    Raises:
        SnapshotError: it cannot be used here.
    """
    given = document.get("named")
    if given is None:
        return None
    given = table(given, "its named session")
    name = text(entry(given, "name"), "the name of a session", _MOST_CHARACTERS)
    names = state.names
    if names is None:
        raise SnapshotError(
            f"this snapshot is of the named session {name!r}, and this worker keeps none by name. It is untouched"
        )
    if names.held is not None or not name:
        raise refuse("it is of a named session, and this one has a name already")
    session = names.store.empty(names.owner, name, text(entry(given, "tag"), "the mark of its use", 64))
    session.count = whole_number(entry(given, "count"), "the count of its values", _MOST_NUMBER)
    for key, version, structure, tensors, age in rows(entry(given, "values"), "its named values", 5):
        session.values[text(key, "a name", _MOST_CHARACTERS)] = StoredValue(
            whole_number(version, "a version", session.count),
            data(structure, "the structure of a named value", names.store.max_bytes),
            [_read_numbered(session, row, value_at) for row in rows(tensors, "the tensors of a named value", 2)],
            names.store.put_at(real(age, "the age of a named value")),
        )
    if len(set(session.numbers.values())) < len(session.numbers):
        raise refuse("two tensors of its named session have one number")
    return session


def use_named(state: SessionState, session: NamedSession | None) -> None:
    """Have a session use what was read; nothing, where that is nothing.

    Raises:
        SnapshotError: it cannot.
    """
    names = state.names
    if session is None or names is None:
        return
    try:
        with state.idle(), claimed(state, session.name, tag=session.tag):  # idle: who used it may be executing
            names.store.bring_back(names.holder, session)
    except NamedSessionElsewhereError as error:
        raise SnapshotError(
            f"another client uses the session {session.name!r} at another worker of this volume ({error.where}), and "
            "what it has under names is newer. The snapshot is untouched"
        ) from error
    except (NamedSessionChangedError, LimitExceededError) as error:
        raise SnapshotError(f"{error}. The snapshot is untouched") from error
    names.held = session


def _read_numbered(session: NamedSession, row: Row, value_at: Callable[[object], object]) -> torch.Tensor:
    tensor = value_at(row[0])
    if not isinstance(tensor, torch.Tensor):
        raise refuse("a named value has something else than a tensor")
    session.numbers[id(tensor)] = whole_number(row[1], "the number of a tensor", session.count, least=1)
    return tensor
