"""Classes and functions of the program's main file, in processes to which they travel as code.

A class is made once in a process, and named by its number ever after. What comes back to the process that sent a class
names that very class and leaves it as it is: a copy's methods have the globals of elsewhere, as copies of functions do.
Making the class anew only to find the one that is there would tell its bases of it once more, a registry in
`__init_subclass__` for example.

Elsewhere than in the program, `__main__` is a program of ours. `pickle` finds classes and functions there by name all
the same, as `torch.save` needs them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import cloudpickle.cloudpickle as _cloudpickle

from skyproxy.runtime.calls import current_call

MAIN = "__main__"
IN_MAIN = {"in_main": True}
"""The mark of a class that is found in the main file by its name: a decorator may have made two of one name."""
_OF_MEMBERS = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})
"""The attributes that every member of an enumeration has."""
_made: weakref.WeakSet[type] = weakref.WeakSet()
"""The classes of others: what comes of one is its state from now on."""
_named: weakref.WeakValueDictionary[tuple[str, str], type] = weakref.WeakValueDictionary()
"""The classes of main files, by session and name: those that came last."""
_globals: weakref.WeakValueDictionary[tuple[str, object], Globals] = weakref.WeakValueDictionary()
"""The globals that functions of main files share, by session and file."""
_lock = threading.Lock()
_making = threading.RLock()
_silenced: list[tuple[object, object]] = []
"""Pairs of what stands for an `__init_subclass__` while a class is being made, and of that itself."""


class Globals(Protocol):
    """The globals of the functions of one file."""

    values: dict[str, object]


def find_stand_in(module: str, name: str) -> Callable[..., object] | None:
    """Return what an unpickler calls instead of a function of cloudpickle; None for what may be called itself."""
    return _STAND_INS.get(name) if module == _cloudpickle.__name__ else None


def complete(kind: type, reduced: Any) -> Any:
    """Return what cloudpickle says of a class, with what it leaves out: its full name, its slots, and `IN_MAIN`."""
    if not isinstance(reduced, tuple) or reduced[0] not in (_MAKE_CLASS, _MAKE_ENUM):
        return reduced
    make, arguments, (state, slots), *others = reduced
    state = _with_own_hook(state)
    if make is _MAKE_CLASS:
        *first, attributes, number, extra = arguments
        attributes = {**attributes, "__qualname__": kind.__qualname__}
        if "__slots__" in state and not issubclass(kind, tuple):  # a NamedTuple brings its own
            attributes["__slots__"] = state["__slots__"]
            state = {name: value for name, value in state.items() if type(value) is not types.MemberDescriptorType}
        arguments = (*first, attributes, number, extra)
    else:
        arguments, state, slots = _complete_enum(kind, arguments, state)
    if kind.__module__ == MAIN and kind in (vars(sys.modules[MAIN]).get(kind.__qualname__), _named.get(_key(kind))):
        arguments = (*arguments[:-1], IN_MAIN)
    return make, arguments, (state, slots), *others


def _with_own_hook(state: dict[str, object]) -> dict[str, object]:
    """Return what was read of a class, with its own `__init_subclass__` where another one stood in its place."""
    hook = state.get("__init_subclass__")
    own = next((own for stand_in, own in list(_silenced) if stand_in is hook), hook)
    return state if own is hook else {**state, "__init_subclass__": own}


def _complete_enum(
    kind: Any, arguments: tuple[object, ...], state: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object], dict[str, object]]:
    """Add to what cloudpickle says of an enumeration its aliases, and what its `__init__` or `__new__` gave members."""
    bases, name, qualname, _, *others = arguments
    members = {alias: member.value for alias, member in kind.__members__.items()}
    state = {attribute: value for attribute, value in state.items() if attribute not in members}
    given: dict[str, object] = {
        member.name: {attribute: value for attribute, value in vars(member).items() if attribute not in _OF_MEMBERS}
        for member in kind
    }
    return (bases, name, qualname, members, *others), state, given


def reduce_type_parameter(parameter: Any) -> object:
    """Return how a `ParamSpec`, `TypeVarTuple` or `NewType` of the main file travels; NotImplemented for others."""
    found = _cloudpickle._lookup_module_and_qualname(parameter, name=parameter.__name__)
    if found is not None and not _cloudpickle._is_registered_pickle_by_value(found[0]):
        return NotImplemented
    kind, more = type(parameter), {}
    if kind is typing.ParamSpec:
        more = {name: getattr(parameter, f"__{name}__") for name in ("bound", "covariant", "contravariant")}
    given = (parameter.__supertype__,) if kind is typing.NewType else ()
    number = _cloudpickle._get_or_create_tracker_id(parameter)
    return _make_type_parameter, (kind, parameter.__name__, given, more, parameter.__module__, number)


def _make_type_parameter(
    kind: Any, name: str, given: tuple[object, ...], more: dict[str, object], module: str, number: str
) -> object:
    made = kind(name, *given, **more)
    made.__module__ = module
    return _cloudpickle._lookup_class_or_track(number, made)


def share_globals(file: object, shared: Globals) -> None:
    """Have `pickle` find by name what functions of a main file share, for the session whose call this is."""
    with _lock:
        _globals[_session(), file] = shared


def name_in_main() -> None:
    """Have `pickle` in this process, which is not the program, find what came of the program's main file by name."""
    vars(sys.modules[MAIN])["__getattr__"] = _find_in_main


def _make_class(
    constructor: object, name: str, bases: tuple[object, ...], attributes: dict[str, object], number: str, extra: object
) -> type:
    qualname = str(attributes.get("__qualname__", name))
    known = _find_known(number, extra) or _find_own(attributes.get("__module__"), qualname)
    if known is not None:
        return known
    with _telling_no_bases(bases):
        return _keep(_MAKE_CLASS(constructor, name, bases, attributes, number, extra), extra)


@contextlib.contextmanager
def _telling_no_bases(bases: tuple[object, ...]) -> Iterator[None]:
    """Have no base's `__init_subclass__` told of a class here: where the class was defined it was, with its keywords.

    What that changed came with the class and its bases. Other threads see nothing of it: their subclasses are told of,
    what they write of a base has its own hook, and a hook that they set meanwhile stays.
    """
    kinds = [kind for kind in types.resolve_bases(bases) if isinstance(kind, type)]
    told = [base for kind in kinds for base in kind.__mro__ if base in _made and "__init_subclass__" in vars(base)]
    if not told:
        yield
        return
    me = threading.get_ident()

    def stand_in(plain: classmethod[type, ..., None]) -> object:
        def __init_subclass__(cls: type, /, **keywords: object) -> None:
            if threading.get_ident() != me:
                plain.__get__(None, cls)(**keywords)

        return classmethod(__init_subclass__)

    with _making:
        silent_already = [silent for silent, _ in _silenced]  # by this thread, in the midst of another class
        plain = [(base, vars(base)["__init_subclass__"]) for base in told]
        hooks = [(base, stand_in(own), own) for base, own in plain if own not in silent_already]
        _silenced.extend((silent, own) for _, silent, own in hooks)
        try:
            for base, silent, _ in hooks:
                type.__setattr__(base, "__init_subclass__", silent)
            yield
        finally:
            for base, silent, own in hooks:
                if vars(base).get("__init_subclass__") is silent:
                    type.__setattr__(base, "__init_subclass__", own)
            del _silenced[len(silent_already) :]


def _make_enum(
    bases: tuple[type, ...],
    name: str,
    qualname: str,
    members: dict[str, object],
    module: str,
    number: str,
    extra: object,
) -> type:
    known = _find_known(number, extra) or _find_own(module, qualname)
    if known is not None:
        return known
    return _keep(_MAKE_ENUM(bases, name, qualname, members, module, number, extra), extra)


def _set_state(kind: Any, state: Any) -> type:
    if kind in _made:
        _cloudpickle._class_setstate(kind, state)
        for name, attributes in state[1].items():  # of an enumeration's members
            vars(kind[name]).update(attributes)
    return kind  # type: ignore[no-any-return]


def _make_function(code: types.CodeType, base: dict[str, object], *others: object) -> types.FunctionType:
    if base.get("__name__") == MAIN and not _is_elsewhere():
        own = vars(sys.modules[MAIN]).get(code.co_name)
        if isinstance(own, types.FunctionType) and own.__code__ == code and own.__closure__ is None:
            return own
    return _cloudpickle._make_function(code, base, *others)  # type: ignore[no-any-return]


def _set_function_state(function: types.FunctionType, state: object) -> None:
    if function.__globals__ is not vars(sys.modules[MAIN]):  # else it is the program's own
        _cloudpickle._function_setstate(function, state)


_STAND_INS: dict[str, Callable[..., object]] = {
    "_make_skeleton_class": _make_class,
    "_make_skeleton_enum": _make_enum,
    "_class_setstate": _set_state,
    "_make_function": _make_function,
    "_function_setstate": _set_function_state,
}


_MAKE_CLASS, _MAKE_ENUM = _cloudpickle._make_skeleton_class, _cloudpickle._make_skeleton_enum


def _find_known(number: str | None, extra: object) -> type | None:
    with _cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        found: type | None = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
    return _keep(found, extra) if found is not None and found in _made else found


def _find_own(module: object, qualname: str) -> type | None:
    """The class of this name in this program: a job's result may come to another one than the job came from."""
    found: Any = None if module != MAIN or _is_elsewhere() else sys.modules[MAIN]
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    return found if isinstance(found, type) and found.__module__ == MAIN else None


def _is_elsewhere() -> bool:
    return vars(sys.modules[MAIN]).get("__getattr__") is _find_in_main


def _keep(made: type, extra: object) -> type:
    _made.add(made)
    if extra == IN_MAIN:
        with _lock:
            _named[_key(made)] = made
    return made


def _key(kind: type) -> tuple[str, str]:
    return _session(), kind.__qualname__


def _session() -> str:
    call = current_call()
    return "" if call is None else call.session


def _find_in_main(name: str) -> object:
    call = current_call()
    with _lock:
        # A thread that a function has started may not know whose it is.
        sessions = {of for of, _ in (*_named, *_globals)} if call is None else {call.session}
        found = [_find_of(session, name) for session in sessions]
    found = [value for value in found if value is not None]
    if len(found) == 1:
        return found[0]
    raise AttributeError(f"the functions of this program brought no {name}: name it in the function, or pass it")


def _find_of(session: str, name: str) -> object:
    found: list[object] = [_named.get((session, name))]
    found += [shared.values.get(name) for (of, _), shared in _globals.items() if of == session]
    return next((value for value in found if value is not None), None)


__all__ = ["complete", "find_stand_in", "name_in_main", "reduce_type_parameter", "share_globals"]
