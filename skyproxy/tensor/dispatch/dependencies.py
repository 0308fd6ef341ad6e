"""Dependencies of code besides its arguments, found in its bytecode; nothing is run.

`skyproxy.tensor.dispatch.memoized_calls` runs a function no more once it knows what the function records. So it has to
know all that decides this: attributes of a module, and the functions that the code looks up by name, which a program
may replace.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from skyproxy.tensor.core.remote_tensor import RemoteTensor

CONSTANTS = (int, float, bool, str, torch.dtype, type(None))
_FUNCTIONAL = "torch.nn.functional"
_PURE = frozenset({"bool", "float", "int", "isinstance", "len", "list", "max", "min", "range", "slice", "tuple", "zip"})
"""Functions of Python itself that do nothing but compute."""
_EFFECTS = ("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_", "IMPORT_", "LOAD_NAME")
_FUNCTION_OF_METHOD = ".__func__"
"""Ends the path of a method; an attribute of the module in its place has none, or another one."""
_UNUSED = "__module"
_INNER_FUNCTIONS = ("_DEREF", "_CLOSURE", "MAKE_FUNCTION", "YIELD", "RETURN_GENERATOR", "MAKE_CELL", "COPY_FREE_VARS")
_REFUSED = (*_EFFECTS, *_INNER_FUNCTIONS)
_NULL_FOLLOWS = sys.version_info >= (3, 13)
"""Marks of calls come behind what is called. Before 3.13 they come first, so that one may follow that is another's."""

Reader = Callable[..., tuple[tuple[object, ...], tuple[object, ...]]]
"""Takes the arguments of a call; gives those that it depends on, and all else that it finds now."""
_parts_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OPERATORS = ("__add__", "__getitem__", "__matmul__", "__mul__", "__neg__", "__pow__", "__sub__", "__truediv__")


class _DependsOnMoreError(Exception):
    """Raised where the bytecode does not tell what code depends on, or does more than compute."""


class _Uses(NamedTuple):
    """Uses of code, each in the order of the first.

    Attributes:
        arguments: parameters, but for the module.
        attributes: names of attributes of the module.
        lookups: dotted names outside of the function, or of methods of the module, and what is there now.
        of_tensors: names of attributes of all else.
    """

    arguments: dict[str, None]
    attributes: dict[str, None]
    lookups: dict[str, object]
    of_tensors: dict[str, None]


def reader_of(
    function: Callable[..., object], package: str, kind: type | None = None
) -> tuple[Reader, tuple[object, ...]] | None:
    """Return what gives all that a call depends on.

    Args:
        function: what it does is looked for in its bytecode.
        package: where the functions and methods come from that are looked into, too, where the function calls them.
        kind: the class of the module that is the first argument, of which attributes are read and methods called, and
            nothing else; None: there is no such argument.

    Returns:
        A function of the same arguments, which raises what getting an attribute raises, and `TypeError` where these
        are no arguments of the function; and what it finds, beside the arguments, before a program replaces it: the
        same objects. Or None if the function depends on what its bytecode does not tell, such as functions that are
        neither PyTorch's nor the package's, and properties.
    """
    if not isinstance(function, FunctionType) or not function.__code__.co_argcount:
        return None
    if kind is not None and not _has_plain_attributes(kind):
        return None
    search = _Search(package, kind)
    try:
        uses = search.look_into(function, is_method=kind is not None)
    except _DependsOnMoreError:
        return None
    if not all(_is_plain(kind, name) for name in search.attributes):
        return None
    module = function.__code__.co_varnames[0]
    values = [*uses.arguments, *(f"{module}.{name}" for name in search.attributes)]
    read: Any = _evaluator(function, _parameters_of(function), _tuple_of(values))
    read.__defaults__, read.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    look_ups, functions = tuple(search.look_ups), tuple(search.functions)
    parts_of_class = attrgetter(*_OPERATORS, *[name for name in search.of_tensors if hasattr(RemoteTensor, name)])
    if not all(map(_is_of_tensors, parts_of_class(RemoteTensor))):
        return None

    def found(first: object) -> tuple[object, ...]:
        items = parts_of_class(RemoteTensor)
        for each in functions:
            items += _parts_of_function(each)
        for look_up in look_ups:
            items += look_up(first)
        return items

    def read_all(*args: object, **kwargs: object) -> tuple[tuple[object, ...], tuple[object, ...]]:
        return read(*args, **kwargs), found(args[0])

    return read_all, (*parts_of_class(RemoteTensor), *search.usual)


def _has_plain_attributes(kind: type) -> bool:
    """Return whether attributes of a class's objects are got as those of modules are."""
    own: Any = kind
    return own.__getattribute__ is object.__getattribute__ and getattr(own, "__getattr__", None) in (
        None,
        torch.nn.Module.__getattr__,
    )


def _is_plain(kind: type | None, name: str) -> bool:
    """Return whether nothing runs where this attribute is read."""
    return not hasattr(type(inspect.getattr_static(kind, name, None)), "__get__")


def _is_of_tensors(part: object) -> bool:
    """Return whether an attribute of tensors is PyTorch's or ours, and no program's."""
    if isinstance(part, FunctionType):
        return _is_of(part, "torch") or _is_of(part, "skyproxy")
    return type(part).__module__.partition(".")[0] in ("builtins", "skyproxy")


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


class _Search:
    """A search in a function, and in the functions and methods of its package that it calls.

    Attributes:
        attributes: of the module, that any of them reads.
        of_tensors: names of other attributes that any of them reads.
        functions: all of them.
        look_ups: take the module, and give what each of them finds by name.
    """

    def __init__(self, package: str, kind: type | None) -> None:
        self.attributes: dict[str, None] = {}
        self.of_tensors: dict[str, None] = {}
        self.functions: dict[FunctionType, None] = {}
        self.look_ups: list[Callable[[object], tuple[object, ...]]] = []
        self._package = package
        self._kind = kind
        self._found: list[object] = []

    @property
    def usual(self) -> tuple[object, ...]:
        """The parts of all functions, and what they found by name."""
        parts = [part for function in self.functions for part in _parts_of_function(function)]
        return (*parts, *self._found)

    def look_into(self, function: FunctionType, *, is_method: bool) -> _Uses:
        """Return what a function uses, and take note of it.

        Raises:
            _DependsOnMoreError: it depends on more, or one does that it calls.
        """
        self.functions[function] = None
        module = function.__code__.co_varnames[0] if is_method else None
        uses = _uses_of(function, self._package, module, self._kind)
        self.attributes.update(uses.attributes)
        self.of_tensors.update(uses.of_tensors)
        if uses.lookups:
            self.look_ups.append(_evaluator(function, module or _UNUSED, _tuple_of(uses.lookups)))
            self._found.extend(uses.lookups.values())
        for path, item in uses.lookups.items():
            if isinstance(item, FunctionType) and item not in self.functions and _is_of(item, self._package):
                self.look_into(item, is_method=path.endswith(_FUNCTION_OF_METHOD))
        return uses


def _is_of(function: FunctionType, package: str) -> bool:
    """Return whether a function is of a package; one that a program has wrapped has the program's globals."""
    return f"{function.__globals__.get('__name__', '')}.".startswith(f"{package}.")


def _uses_of(function: FunctionType, package: str, module: str | None, kind: type | None) -> _Uses:
    """Return what the code of a function uses.

    Args:
        function: it is not run.
        package: whose functions it may call, beside those of PyTorch.
        module: the parameter of which attributes are read and methods called, and nothing else.
        kind: its class.

    Raises:
        _DependsOnMoreError: the code does more than to compute, or uses the module otherwise.
    """
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    gathered = set(code.co_varnames[len(parameters) :][: bool(code.co_flags & 4) + bool(code.co_flags & 8)])
    uses = _Uses({}, {}, {}, {})
    owner: object = None  # what the last instruction has loaded: the module's name, or a module of Python
    path = ""
    is_called = is_function = False  # whether what is being loaded is to be called, and is found
    instructions = [*dis.get_instructions(code)]
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        what, name = instruction.opname, instruction.argval
        if any(refused in what for refused in _REFUSED):
            raise _DependsOnMoreError(what)
        is_attribute = what in ("LOAD_ATTR", "LOAD_METHOD")
        if (owner is not None and not is_attribute) or (is_function and is_attribute):
            raise _DependsOnMoreError(path)
        # The root of a dotted name may say that what is found there is called.
        is_called = _loads_call(instruction, following) or (is_attribute and is_called and owner not in (None, code))
        is_function = False
        if is_attribute and owner is code:
            if is_called:
                path = f"{module}.{name}{_FUNCTION_OF_METHOD}"
                uses.lookups[path] = _method_of(kind, name, package)
            else:
                uses.attributes[name] = None
            owner = None
        elif is_attribute and owner is None:
            uses.of_tensors[name] = None
        elif is_attribute or what == "LOAD_GLOBAL":
            path = f"{path}.{name}" if is_attribute else name
            if is_attribute or name in function.__globals__:
                found = getattr(owner, name, None) if is_attribute else function.__globals__[name]
                owner = _note_lookup(uses, package, path, found)
                is_function = callable(uses.lookups.get(path))
                if is_function and not is_called:
                    raise _DependsOnMoreError(path)  # what becomes of it, such as reading an attribute of it?
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


def _loads_call(instruction: dis.Instruction, following: dis.Instruction | None) -> bool:
    """Return whether what is loaded is called next."""
    what = instruction.opname
    if _NULL_FOLLOWS and following is not None and following.opname == "PUSH_NULL":
        return True
    return what == "LOAD_METHOD" or (what in ("LOAD_ATTR", "LOAD_GLOBAL") and "NULL" in instruction.argrepr)


def _method_of(kind: type | None, name: str, package: str) -> FunctionType:
    """Return a method of a class.

    Raises:
        _DependsOnMoreError: it is none of the package's.
    """
    found = inspect.getattr_static(kind, name, None)
    if not isinstance(found, FunctionType) or not _is_of(found, package):
        raise _DependsOnMoreError(name)
    return found


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


__all__ = ["CONSTANTS", "Reader", "reader_of"]
