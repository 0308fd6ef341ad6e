"""The attributes of a remote tensor: those that its user set, beside the handle, which nobody else sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

WHOLE_DICT = torch.Tensor.__dict__["__dict__"]
"""Python's own descriptor of the dict in which it looks attributes up, of tensors of any class."""
OWN_ATTRIBUTES = frozenset({"_sky", "_sky_storage", "_is_param"})
"""Attributes that a remote tensor or parameter has in its `__dict__` where PyTorch's own would have nothing."""


class Attributes(dict[str, Any]):
    """The `__dict__` of a remote tensor: whoever reads, copies or prints it sees what users set.

    Libraries hand attributes on by `result.__dict__ = copy(x.__dict__)`, as fastai does: a copy with the handle in it
    would make the result another name for `x`.
    """

    __slots__ = ()

    def shown(self) -> dict[str, object]:
        return {name: value for name, value in dict.items(self) if name not in OWN_ATTRIBUTES}

    def hidden(self) -> dict[str, object]:
        return {name: value for name, value in dict.items(self) if name in OWN_ATTRIBUTES}

    def keys(self) -> Any:
        return self.shown().keys()

    def values(self) -> Any:
        return self.shown().values()

    def items(self) -> Any:
        return self.shown().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shown())

    def __reversed__(self) -> Iterator[str]:
        return reversed(self.shown())

    def __len__(self) -> int:
        return len(self.shown())

    def __contains__(self, name: object) -> bool:
        return name in self.shown()

    def __eq__(self, other: object) -> bool:
        return self.shown() == (other.shown() if isinstance(other, Attributes) else other)

    def __repr__(self) -> str:
        return repr(self.shown())

    def __or__(self, other: Any) -> Any:
        return self.shown() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.shown()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return dict, (self.shown(),)

    def copy(self) -> dict[str, object]:
        return self.shown()

    def clear(self) -> None:
        for name in self.shown():
            del self[name]

    def popitem(self) -> tuple[str, object]:
        name, _ = self.shown().popitem()
        return name, self.pop(name)


def user_attributes(tensor: torch.Tensor) -> dict[str, object]:
    """Return what users set on a tensor, in a dict of its own."""
    return {name: value for name, value in dict.items(WHOLE_DICT.__get__(tensor)) if name not in OWN_ATTRIBUTES}


def exchange_dicts(a: torch.Tensor, b: torch.Tensor) -> None:
    """Give two tensors, each of which may be remote or not, all attributes of the other, handles as well."""
    first, second = WHOLE_DICT.__get__(a), WHOLE_DICT.__get__(b)
    WHOLE_DICT.__set__(a, second)
    WHOLE_DICT.__set__(b, first)
