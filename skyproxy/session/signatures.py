"""The numbers of op signatures: each is defined for the worker once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from operator import call
from typing import Any

from skyproxy.errors import LimitExceededError
from skyproxy.protocol import commands
from skyproxy.session.recorder import Recorder


def op_name(structures: Mapping[int, Any], number: int) -> str:
    """Return the name of the op with a number: "aten::relu", or "a compiled graph"; empty for one that is not known."""
    structure = structures.get(number)
    if structure is None:
        return ""
    name = structure[0] if isinstance(structure, tuple) and structure else ""
    return name if isinstance(name, str) and "::" in name else "a compiled graph"


class Signatures:
    """The op signatures of one session, by what makes them the same.

    Attributes:
        known: the number of a structure that was defined before; None for others.
        structures: for each number that was defined so far, what makes its signature the same as others.
    """

    def __init__(self, recorder: Recorder, max_signatures: int) -> None:
        self._recorder = recorder
        self._max_signatures = max_signatures
        self._numbers: dict[object, int] = {}
        self.structures: dict[int, Any] = {}
        self._lock = threading.RLock()
        self.known: Callable[[Any], int | None] = self._numbers.get

    def number(self, structure: object, define: Callable[[], list[Any]], width: int) -> int:
        """Return the number of an op's signature; define it for the worker the first time.

        Args:
            structure: what makes two signatures the same.
            define: makes the definition, see `protocol.commands`.
            width: how many operands it takes.

        Raises:
            LimitExceededError: the session has as many signatures as it may.
        """
        number = self._numbers.get(structure)
        if number is None:
            with self._lock:
                number = self._numbers.get(structure)
                if number is None:
                    number = commands.FIRST_SIGNATURE + len(self._numbers)
                    if len(self._numbers) >= self._max_signatures:
                        raise LimitExceededError(
                            f"this session uses {len(self._numbers)} different operation signatures, its limit. "
                            "Set SKYPROXY_MAX_SIGNATURES on both sides."
                        )
                    definition = define()
                    self._recorder.widths[number] = width
                    places = commands.number_places(definition)
                    if places:
                        self._recorder.repeats.number_places[number] = places
                    record = partial(self._recorder.emit, (commands.DEFINE, number, definition))
                    know = partial(self.structures.__setitem__, number, structure)
                    remember = partial(self._numbers.__setitem__, structure, number)
                    # All or none: `deque` makes these calls without returning to the interpreter, where Ctrl-C
                    # strikes, and a number that was given twice would end the session.
                    deque(map(call, (record, know, remember)), 0)
        return number
