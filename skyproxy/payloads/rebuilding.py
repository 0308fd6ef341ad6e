"""Objects of classes, made again of plain data: which classes may be, and without any code of theirs.

A peer that is not trusted names a class and gives what it consists of. The class must be one that this program has
loaded already; nothing is imported, no module is asked for an attribute that it would have to compute, and neither a
constructor nor a setter written in Python runs.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from skyproxy.errors import visible
from skyproxy.payloads.exceptions import C_DATA, describe_exception, make_exception, parts_of, set_attributes
from skyproxy.payloads.projects import is_project_module

_END_LOOPS = (StopIteration, StopAsyncIteration)
"""Exceptions that end a loop of whoever calls us, without a word."""
_PROGRAM = frozenset({"__main__", "__mp_main__"})
RETURN_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in vars(torch.return_types).values()
    if isinstance(kind, type) and issubclass(kind, tuple)
}
"""Types of results of PyTorch's functions, such as `torch.return_types.max`, by name."""


class UnknownClassError(LookupError):
    """No such class is here, or none that may be made of plain data."""


def name_of(kind: type) -> tuple[str, str]:
    """Return how a class is named to the other side."""
    return kind.__module__, kind.__qualname__


def full_name(kind: type) -> str:
    """Return how a class is named to people."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def find_class(module: str, qualname: str) -> type:
    """Return a class of this program.

    Raises:
        UnknownClassError: the program has not loaded such a class.
    """
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        # Not by `getattr`: it would run a lazy module's code, or a descriptor's.
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    if not isinstance(found, type):
        raise UnknownClassError(f"{module}.{qualname}")
    return found


def is_own_class(kind: type) -> bool:
    """Return whether a class is the program's own, not a library's."""
    return kind.__module__ in _PROGRAM or is_project_module(sys.modules.get(kind.__module__))


def may_be_the_programs(kind: type) -> bool:
    """Return, on a worker, whether a class can be one of its client's program, where it can be found by its name.

    Such a class came with a function, so that no module here has it; or it is that of a worker in its client's folder.
    """
    if "<locals>" in kind.__qualname__ or _has_end(kind):
        return False
    return is_own_class(kind) or vars(sys.modules.get(kind.__module__, enum)).get(kind.__name__) is not kind


def is_record(kind: type) -> bool:
    """Return whether objects of a class are nothing but their fields: a dataclass, or a named tuple."""
    return dataclasses.is_dataclass(kind) or is_named_tuple(kind)


def is_named_tuple(kind: type) -> bool:
    """Return whether a class was made by `typing.NamedTuple` or `collections.namedtuple`."""
    fields = vars(kind).get("_fields")
    return kind.__bases__ == (tuple,) and isinstance(fields, tuple) and all(type(name) is str for name in fields)


def field_names(kind: type) -> list[str]:
    """Return the fields of a dataclass."""
    return [field.name for field in dataclasses.fields(kind)]


def find_dataclass(module: str, qualname: str) -> type:
    """Return a dataclass of the program's own whose objects are nothing but their fields.

    Raises:
        UnknownClassError: there is none of this name.
    """
    kind = find_class(module, qualname)
    if not is_own_class(kind) or not dataclasses.is_dataclass(kind) or type(kind) is not type or _has_end(kind):
        raise UnknownClassError(full_name(kind))
    if kind.__new__ is not object.__new__:
        raise UnknownClassError(full_name(kind))
    return kind


def set_field(value: object, name: object, content: object) -> None:
    """Give an object that `find_dataclass`'s class was the type of one of its fields.

    Raises:
        UnknownClassError: it has no such field.
    """
    if name not in field_names(type(value)) or not _is_stored(type(value), name):
        raise UnknownClassError(f"{full_name(type(value))} has no field {name!r:.80}")
    object.__setattr__(value, name, content)


def make_named_tuple(module: str, qualname: str, values: Iterable[object]) -> Any:
    """Make a named tuple of the program's own.

    Raises:
        UnknownClassError: there is none of this name and length.
    """
    kind, values = find_class(module, qualname), tuple(values)
    if not is_own_class(kind) or not is_named_tuple(kind) or _has_end(kind):
        raise UnknownClassError(full_name(kind))
    if len(values) != len(vars(kind)["_fields"]):
        raise UnknownClassError(f"{full_name(kind)} does not have {len(values)} fields")
    return tuple.__new__(kind, values)


def find_member(module: str, qualname: str, name: str) -> enum.Enum:
    """Return a member of an enumeration that the program has loaded.

    Raises:
        UnknownClassError: there is none of this name.
    """
    kind = find_class(module, qualname)
    members = vars(kind).get("_member_map_") if issubclass(kind, enum.Enum) else None
    if not isinstance(members, dict) or name not in members:
        raise UnknownClassError(f"{full_name(kind)}.{name}")
    member: enum.Enum = members[name]
    return member


def is_free_attribute(name: object) -> bool:
    """Return whether a tensor may be given an attribute of this name: one that no tensor has."""
    return isinstance(name, str) and not name.startswith("_") and not hasattr(torch.Tensor, name)


# --- exceptions -------------------------------------------------------------------------------------------------------


def find_exception(module: str, qualname: str) -> type[Exception]:
    """Return the class of an exception that may be made of plain data.

    Raises:
        UnknownClassError: the program has not loaded it; or it ends programs or loops instead of being an error; or a
            `__del__` written in Python belongs to it.
    """
    kind = find_class(module, qualname)
    allowed = issubclass(kind, Exception) and not issubclass(kind, _END_LOOPS) and not _has_end(kind)
    if not allowed or type(kind) not in (type, abc.ABCMeta):
        raise UnknownClassError(full_name(kind))
    return kind


def build_exception(kind: type[Exception], arguments: tuple[object, ...], state: Mapping[object, object]) -> Exception:
    """Make an exception of plain data.

    Args:
        kind: from `find_exception`.
        arguments: its `args`.
        state: its attributes.

    Raises:
        Exception: the arguments are none for this class.
    """
    if issubclass(kind, ExceptionGroup):
        parts = arguments[1] if len(arguments) == 2 and isinstance(arguments[0], str) else None
        if not isinstance(parts, list | tuple) or not all(isinstance(item, Exception) for item in parts):
            raise TypeError(f"{full_name(kind)} is not made of these arguments")
    error = make_exception(kind, tuple(map(_show, arguments)))
    for name, value in state.items():
        if not isinstance(name, str):
            continue
        if name == "__notes__" and isinstance(value, list) and all(isinstance(note, str) for note in value):
            set_attributes(error, {name: [visible(note) for note in value]})
        elif name.startswith("__"):
            continue
        elif isinstance(inspect.getattr_static(kind, name, None), C_DATA) or _is_stored(kind, name):
            # A value, a slot, or what a class in C keeps in the object itself, such as the `name` of an ImportError:
            # there, C code takes it.
            set_attributes(error, {name: value})
    return error  # type: ignore[return-value]


class PartOfException:
    """A stand-in for an exception that cannot be pickled, a lock among its attributes for example.

    It is unpickled as an exception of the same class, so that it can be caught: with those of its attributes that can
    be pickled, and a note that names the others.
    """

    def __init__(self, error: BaseException, can_be_sent: Callable[[object], bool]) -> None:
        """Look which parts of it can be sent.

        Raises:
            Exception: whatever code of its class raises.
        """
        arguments, state = parts_of(error)
        if isinstance(error, BaseExceptionGroup):
            parts = [one if can_be_sent(one) else PartOfException(one, can_be_sent) for one in error.exceptions]
            arguments = error.message, parts
        elif not can_be_sent(arguments):
            arguments = (str(error),)
        left_out = [name for name, value in state.items() if not can_be_sent(value)]
        kept = {name: value for name, value in state.items() if name not in left_out}
        if left_out:
            told = f"what cannot be pickled of it is left out: {', '.join(left_out)}"
            kept["__notes__"] = [*getattr(error, "__notes__", ()), told]
        self._parts = type(error), arguments, kept

    def __reduce__(self) -> tuple[object, ...]:
        return describe_exception(*self._parts)


def _show(argument: object) -> object:
    return visible(argument) if type(argument) is str else argument


def _has_end(kind: type) -> bool:
    """Return whether code of the class runs when an object of it dies."""
    return any("__del__" in vars(base) for base in kind.__mro__)


def _is_stored(kind: type, name: str) -> bool:
    """Return whether an attribute of an object is a value or a slot, not a property or anything else that runs code."""
    found = inspect.getattr_static(kind, name, None)
    return type(found) is types.MemberDescriptorType or not hasattr(type(found), "__set__")
