"""Beliefs of a client about the results of an op, as plain data: see `Verification`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from skyproxy import torch_modes
from skyproxy.errors import ConfigurationError, ProtocolError
from skyproxy.snapshots.documents import Row, refuse, rows
from skyproxy.torch_codec import Description, decode_description, encode_description
from skyproxy_server.layouts import decode_all
from skyproxy_server.signatures import OpWatch

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (int, float, bool, complex, str, list, type(None))}


def encode_watch(watch: OpWatch | None) -> Row | None:
    """Return a watch as plain data."""
    if watch is None:
        return None
    return [
        [[_encode_key(key), [encode_description(d) for d in made]] for key, made in watch.restrided.items()],
        [[_encode_key(key), described] for key, described in watch.owed.items()],
    ]


def decode_watch(plain: object, *, cuda: bool) -> OpWatch | None:
    """Return the watch that `encode_watch` was given.

    Raises:
        SnapshotError: there is none.
    """
    if plain is None:
        return None
    if type(plain) is not list or len(plain) != 2:
        raise refuse("what was believed of an operation is malformed")
    restrided, owed = (rows(part, "a belief about an operation", 2) for part in plain)
    try:
        for _, described in owed:
            decode_all(described)
        return OpWatch(
            {_decode_key(key, cuda): decode_all(made) for key, made in restrided},
            {_decode_key(key, cuda): described for key, described in owed},
        )
    except (ProtocolError, ConfigurationError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise refuse(f"what was believed of an operation is malformed ({error!s:.100})") from error


def _encode_key(key: Hashable) -> Row:
    looks, inline, modes = cast(tuple[Row, Row, Row], key)
    return [
        [None if look is None else encode_description(look) for look in looks],
        [_encode_item(item) for item in inline],
        dict(modes),
    ]


def _decode_key(plain: Row, cuda: bool) -> Hashable:
    looks, inline, modes = plain
    descriptions: list[Description | None] = [None if look is None else decode_description(look) for look in looks]
    return (
        tuple(descriptions),
        tuple(_decode_item(item) for item in inline),
        torch_modes.decode(modes, cuda=cuda),
    )


def _encode_item(item: object) -> Row:
    if isinstance(item, type):
        return ["type", item.__name__]
    if isinstance(item, tuple):
        return ["list", [_encode_item(part) for part in item]]
    return ["value", item]


def _decode_item(plain: Row) -> Hashable:
    tag, value = plain
    if tag == "type":
        return _TYPES[value]
    if tag == "list":
        return tuple(_decode_item(part) for part in value)
    if tag != "value":
        raise ValueError(f"no belief is a {tag!r:.40}")
    hash(value)
    found: Hashable = value
    return found
