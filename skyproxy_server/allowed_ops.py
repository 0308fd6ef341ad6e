"""The operators that clients may name: those of `allowed_ops.txt`, one by one, and those that a worker's owner adds.

The list is written by `tests/security/list_allowed_ops.py`, where each operator that was left out has its reason.
Names that the installed torch does not have are unknown to the worker, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from skyproxy.errors import ConfigurationError, UnsupportedOpError
from skyproxy.torch_codec import FORBIDDEN_OPS

ALLOWED = frozenset(Path(__file__).with_name("allowed_ops.txt").read_text(encoding="ascii").split())
"""Names with their overloads: "aten::add.Tensor", "aten::relu"."""
WITH_FUNCTIONS = ("torchvision", "quantized")
"""Namespaces that are open where clients may run code of their own anyway, if what defines them is loaded."""
_NEVER = ("aten", "prim", "prims", "profiler", "inductor", "c10d", "_c10d_functional", "symm_mem")
"""Namespaces that nobody can open as a whole: some of their operators take addresses, files or processes."""
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
    packet = name.partition(".")[0]
    return packet not in FORBIDDEN_OPS and not _opened.isdisjoint((name, packet, name.partition("::")[0]))


def find_overload(name: str) -> torch._ops.OpOverload:
    """The overload that `name` ("aten::add.Tensor") stands for.

    Raises:
        UnsupportedOpError: it is not on the list, or unknown here.
    """
    if type(name) is not str or not is_allowed(name):
        raise UnsupportedOpError(f"{name!s:.100} is not on the worker's list of allowed operations.")
    namespace, _, rest = name.partition("::")
    packet_name, _, overload_name = rest.partition(".")
    try:
        overload = getattr(getattr(getattr(torch.ops, namespace), packet_name), overload_name or "default")
    except AttributeError:
        raise UnsupportedOpError(
            f"{name} is unknown to the worker's torch {torch.__version__}. Use the same torch version on both sides."
        ) from None
    if not isinstance(overload, torch._ops.OpOverload):
        raise UnsupportedOpError(f"{name} is not an operator overload.")
    return overload
