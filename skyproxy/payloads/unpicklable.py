"""The part of a value that cannot be pickled, as people would write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from skyproxy.interrupts import raised_by_handler

_MAX_DEPTH = 8


def first_unpicklable(parts: Mapping[str, object], pickle: Callable[[object], object]) -> str:
    """Return the place of the innermost part that cannot be pickled, such as `config['lock']`; "" if there is none.

    Args:
        parts: values by the names that people have for them.
        pickle: pickles a value, or raises.
    """
    for name, value in parts.items():
        if _is_refused(value, pickle):
            return _innermost(name, value, pickle)
    return ""


def _innermost(place: str, value: object, pickle: Callable[[object], object]) -> str:
    for _ in range(_MAX_DEPTH):
        for step, part in _parts_of(value):
            if _is_refused(part, pickle):
                place, value = place + step, part
                break
        else:
            break
    return place


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif not isinstance(value, type) and isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield from ((f".{name}", part) for name, part in attributes.items())


def _is_refused(value: object, pickle: Callable[[object], object]) -> bool:
    try:
        pickle(value)
    except Exception as error:
        if raised_by_handler(error):
            raise
        return True
    return False


__all__ = ["first_unpicklable"]
