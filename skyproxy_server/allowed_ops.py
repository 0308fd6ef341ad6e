"""The operators that clients may name: those of `allowed_ops.txt`, one by one, and those that a worker's owner adds.

The list is written by `tests/security/list_allowed_ops.py`, where each operator that was left out has its reason.
Names that neither the installed torch nor a library of their namespace has are unknown to the worker, and nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch

from skyproxy.errors import ConfigurationError, UnsupportedOpError
from skyproxy.torch_codec import FORBIDDEN_OPS

ALLOWED = frozenset(Path(__file__).with_name("allowed_ops.txt").read_text(encoding="ascii").split())
"""Names with their overloads: "aten::add.Tensor", "aten::relu"."""
_ANY_LIBRARY = "*"
WITH_FUNCTIONS = ("quantized", _ANY_LIBRARY)
"""Namespaces that are open where clients may run code of their own anyway: one of PyTorch's, and those of libraries."""
_NEVER = ("aten", "prim", "prims", "profiler", "inductor", "c10d", "_c10d_functional", "symm_mem")
"""Namespaces that nobody can open as a whole: some of their operators take addresses, files or processes."""
_OF_PYTORCH = (*_NEVER, "quantized")
_opened: set[str] = set()


def open_ops(names: Iterable[str]) -> None:
    """Lets clients of this process name further operators.

    Args:
        names: namespaces ("torchvision"), operators ("mylib::scale") or overloads ("mylib::scale.out"). Their kernels
            must check their arguments, because they get whatever a client sends.

    Raises:
        ConfigurationError: a name opens a namespace of PyTorch's own as a whole.
    """
    for name in names:
        if not name or (name.partition("::")[0] in _NEVER and "::" not in name):
            raise ConfigurationError(
                f"--allow-ops {name!r} would open a namespace of PyTorch's own. Name single operators of it, such as "
                "aten::bucketize."
            )
        _opened.add(name)


def is_allowed(name: str) -> bool:
    """Return whether clients may name the operator, whether this torch has it or not."""
    if name in ALLOWED:
        return True
    packet, namespace = name.partition(".")[0], name.partition("::")[0]
    if packet in FORBIDDEN_OPS:
        return False
    return not _opened.isdisjoint((name, packet, namespace)) or (
        _ANY_LIBRARY in _opened and namespace not in _OF_PYTORCH
    )


def find_overload(name: str) -> torch._ops.OpOverload:
    """The overload that `name` ("aten::add.Tensor") stands for.

    The first operator of a library, which its owner or functions have opened, loads the package that is called like
    the operator's namespace: clients import it on their side only.

    Raises:
        UnsupportedOpError: it is not on the list, or unknown here.
    """
    if type(name) is not str or not is_allowed(name):
        raise UnsupportedOpError(f"{name!s:.100} is not on the worker's list of allowed operations.")
    overload = _known_overload(name)
    if overload is None:
        _load_library(name)
        overload = _known_overload(name)
    if overload is None:
        raise UnsupportedOpError(_missing_text(name))
    if not isinstance(overload, torch._ops.OpOverload):
        raise UnsupportedOpError(f"{name} is not an operator overload.")
    return overload


def _known_overload(name: str) -> object:
    namespace, _, rest = name.partition("::")
    packet_name, _, overload_name = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet_name), overload_name or "default")
    except AttributeError:
        return None


def _load_library(name: str) -> None:
    library = name.partition("::")[0]
    if not _is_package(library):
        return
    try:
        importlib.import_module(library)
    except (Exception, SystemExit) as error:  # what is named so may be a script
        raise UnsupportedOpError(
            f"{name}: the worker cannot import {library} ({type(error).__name__}: {error!s:.300}). Install a version "
            f"there that fits its torch {torch.__version__}, or move the tensors first: x.cpu()"
        ) from error


def _missing_text(name: str) -> str:
    library = name.partition("::")[0]
    if library in _OF_PYTORCH:
        return f"{name} is unknown to the worker's torch {torch.__version__}. Use the same torch version on both sides."
    if _is_package(library):
        return f"{name} is unknown to the worker's {library}. Use the same version of {library} on both sides."
    return (
        f"{name}: the worker has no package {library}, which defines this operator. Install it there (pip install "
        f"{library}) and connect anew, or move the tensors first: x.cpu()"
    )


def _is_package(library: str) -> bool:
    if not library.isidentifier() or library in (*_OF_PYTORCH, "__main__"):
        return False
    try:
        return find_spec(library) is not None
    except ValueError:  # a module that no finder has found
        return False
