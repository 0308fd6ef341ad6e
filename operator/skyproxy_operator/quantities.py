"""Durations and quantities, as they are written in a spec."""

from __future__ import annotations

import re
from decimal import Decimal

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_DURATION_UNITS = (86400, 3600, 60, 1)
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(?:[eE]([+-]?\d{1,2})|([EPTGM]i?|Ki|k|m|u|n))?", re.ASCII)
_SUFFIXES = {
    None: Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}


def duration_seconds(text: str) -> int | None:
    """The seconds that `text`, such as 1h30m, stands for; None where it is empty or nothing, which means never.

    Raises:
        ValueError: it is no duration.
    """
    match = _DURATION.fullmatch(text) if text.isascii() else None
    if match is None:
        raise ValueError(f"{text!r} is no duration; write it like 30m, 1h30m or 2d")
    return sum(int(amount or 0) * unit for amount, unit in zip(match.groups(), _DURATION_UNITS)) or None


def duration_text(seconds: float) -> str:
    """`seconds` in the form of a spec, such as 1h30m; rounded to whole seconds."""
    rest, parts = round(seconds), []
    for letter, unit in zip("dhms", _DURATION_UNITS):
        amount, rest = divmod(rest, unit)
        if amount:
            parts.append(f"{amount}{letter}")
    return "".join(parts) or "0s"


def quantity(value: object) -> Decimal:
    """The number that a Kubernetes quantity stands for.

    Args:
        value: an integer, or a text such as 500m or 8Gi.

    Raises:
        ValueError: it is no quantity.
    """
    match = _QUANTITY.fullmatch(str(value)) if not isinstance(value, bool) else None
    if match is None:
        raise ValueError(f"{value!r} is no quantity; write it like 1, 500m or 8Gi")
    number, exponent, suffix = match.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent) if exponent is not None else _SUFFIXES[suffix])
