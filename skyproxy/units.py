"""Durations, sizes, quantities and settings, as people write them: read once, for client, pools, operator and server.

A duration is a number of seconds ("90", "0.5") or amounts with units, the largest first and each at most once: d, h, m,
s, ms ("30m", "1h30m", "1.5h", "500ms"). No blanks, nothing below zero, at most ten years.

A quantity is what Kubernetes calls so: a number, and behind it nothing, a decimal suffix (n, u, m, k, M, G, T, P, E), a
binary one (Ki, Mi, Gi, Ti, Pi, Ei) or an exponent ("500m", "8Gi", "1e3").

A size is a quantity of bytes; before its suffix there may be a blank, and behind it a B ("8Gi", "8GiB", "500 MB").

Texts that are none of these raise a ConfigurationError which names what was given, and for what, and has examples.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TypeVar

from skyproxy.errors import ConfigurationError

MAX_DURATION_SECONDS = 10 * 365 * 86400
"""No worker lives longer, and calendars end not much later."""
DURATION_EXAMPLES = "90s, 30m, 1h30m, 2d"

_DIGITS = r"\d{1,30}(?:\.\d{1,18})?"
_NUMBER = r"\d{1,15}(?:\.\d{1,9})?"
_DURATION_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile("".join(f"(?:({_NUMBER}){unit})?" for unit in _DURATION_UNITS), re.ASCII)
_SECONDS = re.compile(_NUMBER, re.ASCII)
_QUANTITY = re.compile(rf"({_DIGITS})(?:[eE]([+-]?\d{{1,2}})|([EPTGM]i?|Ki|k|m|u|n))?", re.ASCII)
_SIZE = re.compile(rf"({_DIGITS}) ?([EPTGM]i?|Ki|k)B?", re.ASCII)
_SUFFIXES = {None: Decimal(1)} | {
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("num", -3)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_Settings = TypeVar("_Settings")


def _show(name: str, given: object) -> str:
    return f"{name}={given!r}" if name else repr(given)


# --- durations --------------------------------------------------------------------------------------------------------


def duration_seconds(given: float | str, name: str = "") -> float:
    """Return the seconds of a duration; a number is one of seconds.

    Args:
        given: the text or the number.
        name: what it is for, such as an option or a field, for the error.

    Raises:
        ConfigurationError: it is not a duration, not more than nothing, or longer than ten years.
    """
    seconds = _parse_duration(given, name) if isinstance(given, str) else _number(given, name)
    if not 0 < seconds <= MAX_DURATION_SECONDS:
        fault = "longer than ten years" if seconds > 0 else "over before it begins"
        raise ConfigurationError(f"{_show(name, given)} is {fault}. Examples: {DURATION_EXAMPLES}")
    return seconds


def limit_seconds(given: float | str | None, name: str = "") -> float | None:
    """Return the seconds of a duration that may be left out: None and an empty text are no limit.

    Raises:
        ConfigurationError: see `duration_seconds`.
    """
    return None if given is None or given == "" else duration_seconds(given, name)


def _parse_duration(text: str, name: str) -> float:
    if _SECONDS.fullmatch(text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if found is None or not any(found.groups()):
        raise ConfigurationError(f"{_show(name, text)} is not a duration. Examples: {DURATION_EXAMPLES}")
    # Decimal: 1.1h is exactly 3960 s.
    parts = zip(found.groups(), _DURATION_UNITS.values())
    return float(sum((Decimal(number) * Decimal(str(size)) for number, size in parts if number), Decimal(0)))


def _number(given: object, name: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or math.isnan(given):
        raise ConfigurationError(f"{_show(name, given)} is not a duration. Examples: {DURATION_EXAMPLES}, or seconds")
    return float(given)


def duration_text(seconds: float) -> str:
    """Return a duration in its written form, rounded to whole seconds: "1h30m" for 5400; "0s" for less than one."""
    rest, text = round(seconds), ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


# --- quantities and sizes ---------------------------------------------------------------------------------------------


def quantity(given: object, name: str = "") -> Decimal:
    """Return the number that a quantity of Kubernetes stands for: 0.5 for "500m".

    Args:
        given: a text, or a number as YAML makes it.
        name: what it is for, for the error.

    Raises:
        ConfigurationError: it is not a quantity.
    """
    found = _QUANTITY.fullmatch(str(given)) if not isinstance(given, bool) else None
    if found is None:
        raise ConfigurationError(f"{_show(name, given)} is not a quantity. Examples: 4, 500m, 8Gi")
    number, exponent, suffix = found.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent) if exponent is not None else _SUFFIXES[suffix])


def plain_text(number: Decimal) -> str:
    """Return a number for programs that know no suffixes: at most nine places, no exponent, no idle zeros."""
    return f"{round(number, 9).normalize():f}"


def size_bytes(given: object, name: str = "") -> int:
    """Return the bytes of a size; a fraction of a byte is dropped.

    Raises:
        ConfigurationError: it is not a size.
    """
    with_unit = _SIZE.fullmatch(str(given))
    try:
        return int(quantity(with_unit[1] + with_unit[2] if with_unit else given))
    except ConfigurationError:
        raise ConfigurationError(f"{_show(name, given)} is not a size. Examples: 512Mi, 8Gi, 8GiB") from None


def size_text(byte_count: int) -> str:
    """Return a size for people, in binary units: "79.2 GiB", "5 B"."""
    size = float(byte_count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# --- settings ---------------------------------------------------------------------------------------------------------


def settings_from(environ: Mapping[str, str] | None, prefix: str, kind: type[_Settings]) -> _Settings:
    """Return the settings that the environment asks for: a variable for each field, the others at their default.

    Args:
        environ: the environment; None for that of this process.
        prefix: what variables begin with; behind it stands the field's name in capitals.
        kind: a dataclass whose fields are texts, numbers or truth values, and have defaults.

    Raises:
        ConfigurationError: a variable's text is not of its field's kind; names the variable.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        variable = prefix + item.name.upper()
        text = environ.get(variable)
        if text is not None:
            type_name = item.type if isinstance(item.type, str) else item.type.__name__
            values[item.name] = _setting(variable, text.strip(), type_name)
    return kind(**values)


def _setting(variable: str, text: str, kind: str) -> object:
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigurationError(f"{variable}={text!r} is neither true nor false. Example: {variable}=1")
        return text.lower() in _TRUE
    if kind.endswith("| None") and not text:
        return None
    convert: Callable[[str], float] = float if kind.startswith("float") else int
    try:
        value = convert(text)
    except ValueError:
        raise ConfigurationError(f"{variable}={text!r} is not a number. Example: {variable}=1000") from None
    if not value >= 0:  # NaN is neither below nor above
        raise ConfigurationError(f"{variable}={text!r} is not a number from 0. Example: {variable}=1000")
    return value
