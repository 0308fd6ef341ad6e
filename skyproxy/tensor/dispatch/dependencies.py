"""Dependencies of code besides its arguments, found in its bytecode; nothing is run.

`skyproxy.tensor.dispatch.memoized_calls` runs a function no more once it knows what the function records. So it has to
know all that decides this: attributes of a module, and the functions that the code looks up by name, which a program
may replace.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

CONSTANTS = (int, float, bool, str, torch.dtype, type(None))
_FUNCTIONAL = "torch.nn.functional"
_PURE = frozenset({"bool", "float", "int", "isinstance", "len", "list", "max", "min", "range", "slice", "tuple", "zip"})
"""Functions of Python itself that do nothing but compute."""
_EFFECTS = ("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_", "IMPORT_", "LOAD_NAME")
_INNER_FUNCTIONS = ("_DEREF", "_CLOSURE", "MAKE_FUNCTION", "YIELD", "RETURN_GENERATOR", "MAKE_CELL", "COPY_FREE_VARS")
_REFUSED = (*_EFFECTS, *_INNER_FUNCTIONS)

Reader = Callable[..., tuple[tuple[object, ...], tuple[object, ...]]]
"""Takes the arguments of a call; gives those that it depends on, and what it looks up by name now."""


class _DependsOnMoreError(Exception):
    """Raised where the bytecode does not tell what code depends on, or does more than compute."""


class _Uses(NamedTuple):
    """Uses of code, each in the order of the first.

    Attributes:
        arguments: parameters, but for the module.
        attributes: names of attributes of the module.
        lookups: dotted names outside of the function, and what is there now.
    """

    arguments: dict[str, None]
    attributes: dict[str, None]
    lookups: dict[str, object]


def reader_of(function: Callable[..., object], package: str) -> tuple[Reader, tuple[object, ...]] | None:
    """Return what gives all that a call depends on, for a function whose first parameter is a module.

    Args:
        function: of the module, it may read attributes only.
        package: where the functions come from that are looked into, too, where the function calls them.

    Returns:
        A function of the same arguments, which raises what getting an attribute raises, and `TypeError` where these
        are no arguments of the function; and what is looked up by name before a program replaces it. Or None if the
        function depends on what its bytecode does not tell, such as functions that are neither PyTorch's nor the
        package's.
    """
    if not isinstance(function, FunctionType) or not function.__code__.co_argcount:
        return None
    module = function.__code__.co_varnames[0]
    try:
        uses = _uses_of(function, package, module)
        called = _lookups_of_called(uses, package, {function})
    except _DependsOnMoreError:
        return None
    values = [*uses.arguments, *(f"{module}.{name}" for name in uses.attributes)]
    usual = tuple(uses.lookups.values())
    read: Any = _evaluator(function, _parameters_of(function), f"{_tuple_of(values)}, {_tuple_of(uses.lookups)}")
    read.__defaults__, read.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    if not called:
        return read, usual

    def read_all(*args: object, **kwargs: object) -> tuple[tuple[object, ...], tuple[object, ...]]:
        values, found = read(*args, **kwargs)
        return values, (*found, *[look_up() for look_up in called])

    return read_all, (*usual, *[look_up() for look_up in called])


def constants_used(module: torch.nn.Module) -> tuple[str, ...] | None:
    """The attributes of a module that its `forward` may read, but for parameters and buffers.

    Returns:
        Their names, or None if one of them is not a constant.
    """
    found: dict[str, None] = {}
    pending, seen = ["forward"], {"forward"}
    while pending:
        attribute = getattr(type(module), pending.pop(), None)
        code = getattr(inspect.unwrap(attribute), "__code__", None) if callable(attribute) else None
        for name in _names_in(code) - seen if code is not None else ():
            seen.add(name)
            if name in vars(module):
                found[name] = None
            elif isinstance(vars(type(module)).get(name), FunctionType):
                pending.append(name)
            elif type(getattr(type(module), name, None)) in (int, float, bool, str):
                return None  # an attribute of the class, whose changes nobody reports
    return tuple(found) if all(type(vars(module)[name]) in CONSTANTS for name in found) else None


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _parameters_of(function: FunctionType) -> str:
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    plain = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else None)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))[1:-1]


def _tuple_of(expressions: Iterable[str]) -> str:
    return f"({''.join(f'{expression}, ' for expression in expressions)})"


def _evaluator(function: FunctionType, parameters: str, expressions: str) -> Callable[..., Any]:
    """A function that gives what these expressions are where `function` is."""
    made: Callable[..., Any] = eval(f"lambda {parameters}: ({expressions})", function.__globals__)
    return made


def _lookups_of_called(uses: _Uses, package: str, seen: set[FunctionType]) -> list[Callable[[], tuple[object, ...]]]:
    """Return what gives, for each called function of the package, what that one looks up by name.

    Raises:
        _DependsOnMoreError: one depends on more.
    """
    readers = []
    for item in uses.lookups.values():
        if isinstance(item, FunctionType) and item not in seen and _is_of(item, package):
            seen.add(item)
            used = _uses_of(item, package)
            if used.lookups:
                readers.append(_evaluator(item, "", _tuple_of(used.lookups)))
                readers.extend(_lookups_of_called(used, package, seen))
    return readers


def _is_of(function: FunctionType, package: str) -> bool:
    """Return whether a function is of a package; one that a program has wrapped has the program's globals."""
    return f"{function.__globals__.get('__name__', '')}.".startswith(f"{package}.")


def _uses_of(function: FunctionType, package: str, module: str | None = None) -> _Uses:
    """Return what the code of a function uses.

    Args:
        function: it is not run.
        package: whose functions it may call, beside those of PyTorch.
        module: the parameter of which attributes are read, and nothing else.

    Raises:
        _DependsOnMoreError: the code does more than to compute, or uses the module otherwise.
    """
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    gathered = set(code.co_varnames[len(parameters) :][: bool(code.co_flags & 4) + bool(code.co_flags & 8)])
    uses = _Uses({}, {}, {})
    owner: object = None  # what the last instruction has loaded: the module's name, or a module of Python
    path = ""
    for instruction in dis.get_instructions(code):
        what, name = instruction.opname, instruction.argval
        if any(refused in what for refused in _REFUSED):
            raise _DependsOnMoreError(what)
        is_attribute = what in ("LOAD_ATTR", "LOAD_METHOD")
        if owner is not None and not is_attribute:
            raise _DependsOnMoreError(path)
        if is_attribute and owner is not None:
            if owner is code:
                if what == "LOAD_METHOD" or "NULL" in instruction.argrepr:
                    raise _DependsOnMoreError(path)  # a method of the module
                uses.attributes[name] = None
                owner = None
            else:
                path = f"{path}.{name}"
                owner = _note_lookup(uses, package, path, getattr(owner, name, None))
        elif what == "LOAD_GLOBAL":
            path = name
            if name in function.__globals__:
                owner = _note_lookup(uses, package, path, function.__globals__[name])
            elif name not in _PURE or not hasattr(builtins, name):
                raise _DependsOnMoreError(name)
        elif "LOAD_FAST" in what:
            loaded = name if isinstance(name, tuple) else (name,)
            loaded = loaded[1:] if what.startswith("STORE_") else loaded
            if not gathered.isdisjoint(loaded) or module in loaded[:-1]:
                raise _DependsOnMoreError(name)
            uses.arguments.update((each, None) for each in loaded if each in parameters and each != module)
            owner, path = (code, str(module)) if loaded[-1:] == (module,) else (None, "")
    return uses


def _note_lookup(uses: _Uses, package: str, path: str, found: object) -> object:
    """Note what is found at a dotted name; return it if it is a module of Python, whose attribute comes next.

    Raises:
        _DependsOnMoreError: it may be anything.
    """
    if isinstance(found, ModuleType):
        return found
    if not isinstance(found, CONSTANTS):
        only_computes = (
            _is_of(found, package) or _is_of(found, _FUNCTIONAL) if isinstance(found, FunctionType) else _is_op(found)
        )
        if not only_computes:
            raise _DependsOnMoreError(path)
    uses.lookups[path] = found
    return None


def _is_op(found: object) -> bool:
    """Return whether something is an operator of PyTorch, and none of its switches, such as those of modes."""
    if not isinstance(found, BuiltinFunctionType):
        return False
    return f"{found.__module__}.".startswith("torch.") and hasattr(torch.ops.aten, found.__name__)


__all__ = ["CONSTANTS", "Reader", "constants_used", "reader_of"]
