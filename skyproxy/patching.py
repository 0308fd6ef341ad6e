"""The one way in which skyproxy replaces an attribute of PyTorch, of another library, or of Python.

Every replacement is listed with its reason, its moment and the test that fails without it: `docs/reference/patches.md`
is written from the list, a test compares the list with what differs in a fresh process, and `undo_all` goes through it
backwards. What is set is the given object itself, so that a replacement costs no call more. This module imports nothing
of what it patches.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from skyproxy.errors import ConfigurationError

_ROOT = Path(__file__).resolve().parent.parent


class When(StrEnum):
    """The moment of a replacement: a clause that completes "as soon as"."""

    IMPORT = "`torch` and `skyproxy` are both imported"
    FIRST_DEVICE = "the first `sky` device exists"
    SECOND_DEVICE = "a second `sky` device exists"
    OTHER_DEVICE = "a program makes another device than `sky:0` the current one"
    DYNAMO = "`torch._dynamo` is imported, which `torch.compile` does"
    FLEX_ATTENTION = "`torch.nn.attention.flex_attention` is imported"
    TRANSFORMERS = "`transformers` is imported"
    HUGGINGFACE = "`skyproxy.integrations.huggingface.use` is entered"
    LIGHTNING = "`skyproxy.integrations.lightning` is imported"
    QUIET = "a function under `skyproxy.silent`, `stdout` or `stderr` runs, and only so long"
    WORKER = "a worker runs functions, in the process of the worker alone"


class _Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
"""The original of an attribute that its owner did not have itself: not at all, or by inheritance."""


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """A replaced or added attribute, or an entry of a table.

    Attributes:
        place: its dotted name, as a reader would look for it.
        owner: the module, class or object that has the attribute; None for a registration.
        name: the attribute; an empty string for a registration.
        original: what `owner` itself had before, or `ABSENT`.
        replacement: what it has now.
        file: where skyproxy does so, relative to the repository.
        when: the moment.
        why: the reason, a clause.
        test: the test that fails without it, as `pytest` names it.
        undo: what restores the state before where setting the attribute would not.
        stays: the reason why nothing can restore that state; empty where something can.
    """

    place: str
    owner: object
    name: str
    original: object
    replacement: object
    file: str
    when: When
    why: str
    test: str
    undo: Callable[[], object] | None = None
    stays: str = ""


PATCHES: list[Patch] = []
"""Every replacement of this process, in the order in which they were made."""

_lock = threading.RLock()


def replace(
    owner: object,
    name: str,
    new: object,
    *,
    why: str,
    test: str,
    when: When = When.IMPORT,
    label: str = "",
    undo: Callable[[], object] | None = None,
    stays: str = "",
) -> Patch:
    """Set an attribute that `owner` has, itself or by inheritance.

    Args:
        label: the dotted name of `owner`, where that is neither a module nor a class.

    Raises:
        ConfigurationError: if `owner` has no such attribute.
    """
    require(owner, name, label=label)
    return _set(owner, name, new, why=why, test=test, when=when, label=label, undo=undo, stays=stays)


def wrap(
    owner: object, name: str, make: Callable[[Any], object], *, why: str, test: str, when: When = When.IMPORT
) -> Any:
    """Replace an attribute by what `make` makes of it; return the original.

    Raises:
        ConfigurationError: if `owner` has no such attribute.
    """
    require(owner, name)
    original = getattr(owner, name)
    _set(owner, name, make(original), why=why, test=test, when=when)
    return original


def add(owner: object, name: str, new: object, *, why: str, test: str, when: When = When.IMPORT) -> Patch:
    """Set an attribute that `owner` need not have."""
    return _set(owner, name, new, why=why, test=test, when=when)


def append(owner: object, name: str, item: object, *, why: str, test: str, when: When = When.IMPORT) -> None:
    """Append `item` to the list that is the attribute, unless it is there.

    Raises:
        ConfigurationError: if `owner` has no such list.
    """
    require(owner, name)
    items: list[object] = getattr(owner, name)
    if item not in items:
        items.append(item)
        registered(f"{_label(owner)}.{name}", lambda: items.remove(item), why=why, test=test, when=when)


def enter(owner: object, name: str, key: str, value: object, *, why: str, test: str, when: When = When.IMPORT) -> None:
    """Enter a value under a new key in the dict that is the attribute.

    Raises:
        ConfigurationError: if `owner` has no such dict.
    """
    require(owner, name)
    table: dict[str, object] = getattr(owner, name)
    table[key] = value
    registered(f"{_label(owner)}.{name}[{key!r}]", lambda: table.pop(key, None), why=why, test=test, when=when)


def is_replaced(owner: object, name: str) -> bool:
    """Return whether skyproxy has replaced the attribute, and not put it back."""
    with _lock:
        return any(patch.owner is owner and patch.name == name for patch in PATCHES)


def replace_everywhere(name: str, plain: object, new: object, *, why: str, test: str, when: When = When.IMPORT) -> None:
    """Replace a function or a constant in every loaded module that has it under this name.

    Whoever imports it later takes it from its package; some have taken it before.
    """
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is plain:
            _set(module, name, new, why=why, test=test, when=when)


def registered(
    place: str,
    undo: Callable[[], object] | None,
    *,
    why: str,
    test: str,
    when: When = When.IMPORT,
    stays: str = "",
) -> None:
    """List what a function of PyTorch or of Python has just put into a table of its own.

    Args:
        place: what was registered, and where.
        undo: takes it out again; None where `stays` says why nothing can.
    """
    _note(Patch(place, None, "", ABSENT, ABSENT, _caller(), when, why, test, undo, stays))


@contextlib.contextmanager
def noting(
    owners: Iterable[object], *, why: str, test: str, when: When = When.IMPORT, stays: str = ""
) -> Iterator[None]:
    """List the attributes that a function of PyTorch sets on one of `owners` inside the `with` block."""
    before = [(owner, dict(vars(owner))) for owner in owners]
    yield
    for owner, had in before:
        for name, value in list(vars(owner).items()):
            original = had.get(name, ABSENT)
            if original is not value:
                place = f"{_label(owner)}.{name}"
                _note(Patch(place, owner, name, original, value, _caller(), when, why, test, stays=stays))


def require(owner: object, *names: str, label: str = "") -> None:
    """Refuse a library that lacks an attribute that skyproxy replaces or calls.

    Raises:
        ConfigurationError: if one is missing; names it, the library and its version.
    """
    for name in names:
        if not hasattr(owner, name):
            whose = label or _label(owner)
            library = whose.partition(".")[0]
            version = getattr(sys.modules.get(library), "__version__", "of this environment")
            raise ConfigurationError(
                f"{library} {version} has no {whose}.{name}, which skyproxy needs. Install a version that "
                "docs/reference/compatibility.md names as tried, or a newer skyproxy."
            )


def undo(patch: Patch) -> bool:
    """Restore what was before one replacement and take it off the list; return False if that cannot be.

    It cannot where it stays for good, and where somebody else has replaced the attribute since: their replacement may
    call ours.
    """
    with _lock:
        if patch.stays or patch not in PATCHES:
            return False
        PATCHES.remove(patch)
        if patch.undo is not None:
            patch.undo()
        elif vars(patch.owner).get(patch.name, ABSENT) is not patch.replacement:
            return False
        elif patch.original is ABSENT:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, patch.original)
        return True


def undo_all(but: Container[When] = ()) -> list[Patch]:
    """Restore what was before every replacement, the last one first; return those that could not be undone.

    Args:
        but: the moments whose replacements stay.
    """
    with _lock:
        return [patch for patch in reversed(list(PATCHES)) if patch.when not in but and not undo(patch)]


def _set(
    owner: object,
    name: str,
    new: object,
    *,
    why: str,
    test: str,
    when: When,
    label: str = "",
    undo: Callable[[], object] | None = None,
    stays: str = "",
) -> Patch:
    with _lock:
        original = vars(owner).get(name, ABSENT)
        setattr(owner, name, new)
        place = f"{label or _label(owner)}.{name}"
        patch = Patch(place, owner, name, original, vars(owner)[name], _caller(), when, why, test, undo, stays)
        _note(patch)
        return patch


def _note(patch: Patch) -> None:
    with _lock:
        PATCHES.append(patch)


def _caller() -> str:
    """Return the file of the first caller that is not this module, nor `contextlib`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name


def _label(owner: object) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"
