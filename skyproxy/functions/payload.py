"""A function and its arguments, ready to be sent."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Mapping, Sequence

import torch

from skyproxy.errors import ConfigurationError, VersionMismatchError
from skyproxy.functions import code_cache
from skyproxy.functions.function_code import FunctionCode, unwrapped
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads.pickling import Pickled, Pickler, pickle_simple
from skyproxy.payloads.pieces import flat_size
from skyproxy.payloads.unpicklable import first_unpicklable
from skyproxy.protocol.messages import Buffer
from skyproxy.runtime.call_groups import is_simple
from skyproxy.session.session import Session
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor

_SMALL_BYTES = 64 << 10
LARGE_BYTES = 1 << 20
_MAX_CALLS = 64
"""Of a group."""
_UNBOUND = types.CellType()


class Payload:
    """A function and its arguments as bytes: made once, sent to one worker or to many.

    Attributes:
        name: the function's name, for people.
        pickled: the bytes, and what goes beside them.
        session: the session whose tensors are among the arguments; None if there are none.
        code: the function, where it is not among those bytes.
    """

    def __init__(self, name: str, pickled: Pickled, session: Session | None, code: FunctionCode | None = None) -> None:
        self.name = name
        self.pickled = pickled
        self.session = session
        self.code = code

    @classmethod
    def of(
        cls, fn: Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Payload:
        """Pickles a call.

        Large arrays and CPU tensors are not copied before they are sent: leave them as they are until then.

        Raises:
            ConfigurationError: `fn` cannot be called, tensors of several workers are among the arguments, or something
                in there cannot be pickled.
        """
        if not callable(fn):
            raise ConfigurationError(f"{fn!r:.80} cannot be called. Pass a function, followed by its arguments.")
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        name = name.rpartition("<locals>.")[2]
        sessions: list[Session] = []

        def meet(session: Session) -> None:
            if session not in sessions:
                sessions.append(session)
            if len(sessions) > 1:
                raise ConfigurationError(
                    f"the arguments of {name} hold tensors of two workers, and a function runs on one. "
                    "Move them first: x.to(node.device(...))."
                )

        def refer(tensor: torch.Tensor) -> list[object] | None:
            if type(tensor) is not RemoteTensor:
                return None
            meet(tensor._sky.device.session)
            return []

        def refer_device(device: torch.device) -> list[object] | None:
            if device.type != "sky":
                return None
            chosen = DEVICES.of(device)
            meet(chosen.session)
            return chosen.place

        def make_pickler() -> Pickler:
            return Pickler(refer, refer_device, sends_projects=True, sends_lines=True)

        pickled: Pickled | None = None
        try:
            code = FunctionCode.of(fn, make_pickler)
            if code is not None and _are_simple(args, kwargs):
                pickled = pickle_simple((None, tuple(args), dict(kwargs or {})))
            if pickled is None:
                sent = fn if code is None else None
                pickled = make_pickler().pickle((sent, tuple(args), dict(kwargs or {})))
        except ConfigurationError:
            raise
        except (TypeError, AttributeError, pickle.PicklingError, ValueError, RecursionError) as error:
            if raised_by_handler(error):
                raise
            place = first_unpicklable(_parts(fn, args, kwargs or {}), lambda value: make_pickler().pickle(value))
            what = str(error).rstrip(".") + (f", in {place}" if place else "")
            raise ConfigurationError(
                f"{name} cannot be sent to a worker: {what}. Its arguments and what it refers to must be picklable; "
                "open files, locks and the like are made inside the function instead."
            ) from error
        return cls(name, pickled, sessions[0] if sessions else None, code)

    @property
    def tables(self) -> dict[str, object]:
        """The tables that must travel with the pieces."""
        if self.code is None:
            return self.pickled.tables
        return {**self.pickled.tables, "function": [self.code.digest, self.code.keeps_globals]}

    def pieces(self, *, with_code: bool) -> list[Buffer]:
        """Return what is sent: the arguments and the function; an empty piece in its place for a worker that has it."""
        if self.code is None:
            return self.pickled.pieces
        first, *rest = self.pickled.pieces
        return [first, self.code.content if with_code else b"", *rest]

    @property
    def is_small(self) -> bool:
        """True if keeping it until the end of its call costs next to nothing."""
        return sum(map(flat_size, self.pickled.pieces)) <= _SMALL_BYTES

    @property
    def is_large(self) -> bool:
        """True if sending it takes a while."""
        return sum(map(flat_size, self.pickled.pieces)) >= LARGE_BYTES

    @property
    def tensors(self) -> list[RemoteTensor]:
        """The remote tensors among the arguments."""
        return self.pickled.references  # type: ignore[return-value]

    def check(self, session: Session, own_python: str) -> None:
        """Check that the tensors among the arguments are this worker's.

        Raises:
            ConfigurationError: the arguments hold tensors of another worker.
            VersionMismatchError: the function's code cannot run on the worker's Python.
        """
        if self.session is not None and self.session is not session:
            raise ConfigurationError(
                f"the arguments of {self.name} hold tensors of another worker. Run it there, or move them first: "
                "x.to(node.device(...))."
            )
        theirs = session.welcome.software.get("python", own_python)
        by_value = self.pickled.by_value if self.code is None else self.code.name
        if by_value and theirs != own_python and theirs.split(".")[:2] != own_python.split(".")[:2]:
            raise VersionMismatchError(
                f"{by_value} travels as bytecode, and the worker runs Python {theirs}, this process "
                f"{own_python}. Use the same Python on both sides (3.{theirs.split('.')[1]} here, or another image "
                "there), or a function that the worker can import from an installed package."
            )


def _are_simple(args: Sequence[object], kwargs: Mapping[str, object] | None) -> bool:
    """Return whether the arguments are simple, or those of each call of a group."""
    return all(map(_is_simple, args)) and (not kwargs or all(map(is_simple, kwargs.values())))


def _is_simple(argument: object) -> bool:
    return is_simple(argument) or (
        type(argument) is list and len(argument) <= _MAX_CALLS and all(map(is_simple, argument))
    )


def _parts(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return what is sent of a call, by what people call it: its arguments, and what its function refers to."""
    parts = {f"argument {number}": value for number, value in enumerate(args, 1)}
    parts |= {f"the argument {name}": value for name, value in kwargs.items()}
    inner = unwrapped(fn)
    if isinstance(inner, types.FunctionType):
        bound = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
        parts |= {f"the outer function's {name}": cell.cell_contents for name, cell in bound if cell != _UNBOUND}
        names = code_cache.names_of(inner.__code__)
        parts |= {f"the global {name}": inner.__globals__[name] for name in names if name in inner.__globals__}
    return parts
