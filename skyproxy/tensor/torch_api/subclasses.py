"""Remote tensors of the user's own classes: `as_subclass`, and what `torch.Tensor._make_subclass` makes.

A tensor has one Python class, and that of remote tensors is taken. So for each class of the user's there is one that is
both, made when it is first wanted. The user's `__torch_function__` sees its own class, never ours; below it, for the
time of one operation, such a tensor is a plain remote tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from skyproxy import patching
from skyproxy.tensor.core.remote_tensor import OWN_ATTRIBUTES, RemoteTensor
from skyproxy.tensor.core.torch_private import OpOverload

_disabled = torch._C._disabled_torch_function_impl
_make_plain_subclass = torch.Tensor._make_subclass
_joined: dict[type, type] = {}
_dict_of = torch.Tensor.__dict__["__dict__"]


class Attributes(dict[str, Any]):
    """The `__dict__` of a tensor of a user's class: whoever reads, copies or prints it sees what users set.

    Libraries hand attributes on by `result.__dict__ = copy(x.__dict__)`, as fastai does: a copy with the handle in it
    would make the result another name for `x`.
    """

    def shown(self) -> dict[str, Any]:
        return {name: value for name, value in dict.items(self) if name not in OWN_ATTRIBUTES}

    def hidden(self) -> dict[str, Any]:
        return {name: value for name, value in dict.items(self) if name in OWN_ATTRIBUTES}

    def keys(self) -> Any:
        return self.shown().keys()

    def values(self) -> Any:
        return self.shown().values()

    def items(self) -> Any:
        return self.shown().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shown())

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

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return dict, (self.shown(),)

    def copy(self) -> dict[str, Any]:
        return self.shown()

    def clear(self) -> None:
        for name in self.shown():
            del self[name]


class RemoteSubclass(RemoteTensor):
    """The common part of the classes that are made here.

    Attributes:
        local_class: the user's class.
    """

    local_class: type

    @property
    def __dict__(self) -> Attributes:
        found = _dict_of.__get__(self)
        attributes = found if isinstance(found, Attributes) else Attributes(found)
        if attributes is not found:
            _dict_of.__set__(self, attributes)
        return attributes

    @__dict__.setter
    def __dict__(self, attributes: dict[str, Any]) -> None:
        # The dict of another tensor itself is taken as it is: so `torch.utils.swap_tensors` exchanges all of two.
        if not dict.__contains__(attributes, "_sky"):
            attributes = Attributes(attributes, **self.__dict__.hidden())
        _dict_of.__set__(self, attributes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        found: list[tuple[RemoteTensor, type]] = []
        for a in (*args, *(kwargs or {}).values()):
            for item in a if isinstance(a, list | tuple) else (a,):
                if isinstance(item, RemoteSubclass):
                    found.append((item, type(item)))
        try:
            for item, _ in found:
                item.__class__ = RemoteTensor
            return RemoteTensor.__torch_dispatch__(func, (RemoteTensor,), args, kwargs or {})
        finally:
            for item, kind in found:
                item.__class__ = kind

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        rebuild, parts = as_plain(self).__reduce_ex__(protocol)
        return torch._tensor._rebuild_from_type_v2, (rebuild, self.local_class, parts, dict(self.__dict__))

    def __deepcopy__(self, memo: dict[object, object]) -> object:
        if id(self) not in memo:
            copied = RemoteTensor.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
            copied.__class__ = type(self)
            memo[id(self)] = copied
        return memo[id(self)]


def joined_class(cls: type[Any]) -> type[Any]:
    """The class of remote tensors that are of a class of the user's.

    Raises:
        TypeError: that class handles operations itself, or stores what a tensor has no room for.
    """
    if cls in _joined:
        return _joined[cls]
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"a remote tensor cannot be a {cls.__name__}, which has its own __torch_dispatch__")

    def torch_function(
        unused: object,
        func: object,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        local = tuple(kind.local_class if issubclass(kind, RemoteSubclass) else kind for kind in types)
        return cls.__torch_function__(func, local, args, kwargs or {})

    of_class = cls.__torch_function__
    members: dict[str, object] = {
        "__torch_function__": of_class if of_class is _disabled else classmethod(torch_function),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "local_class": cls,
    }
    made = type(cls)(cls.__name__, (cls, RemoteSubclass), members)  # type: ignore[misc]
    return _joined.setdefault(cls, made)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same remote tensor as one of no class of the user's; shares its history."""
    with torch._C.DisableTorchFunctionSubclass():
        plain: torch.Tensor = torch.ops.aten.alias.default(tensor)
    return plain


def as_subclass(self: torch.Tensor, cls: type) -> torch.Tensor:
    """`Tensor.as_subclass` of a remote tensor."""
    return _in_class(as_plain(self), cls)


def _in_class(tensor: torch.Tensor, cls: type) -> torch.Tensor:
    """The same object, of a class of the user's from now on."""
    if issubclass(cls, RemoteSubclass):
        cls = cls.local_class
    if cls is not torch.Tensor and cls is not RemoteTensor:
        tensor.__class__ = joined_class(cls)
    return tensor


def _make_subclass(cls: type[Any], data: torch.Tensor, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
    """`torch.Tensor._make_subclass`, also of remote tensors. Named as in Dynamo's stand-in, which compares."""
    requires_grad = kwargs.pop("require_grad", requires_grad)
    if not isinstance(data, RemoteTensor):
        plain: torch.Tensor = _make_plain_subclass(cls, data, requires_grad, **kwargs)
        return plain
    if any(kwargs.values()):
        raise NotImplementedError(f"a remote tensor takes no {', '.join(kwargs)} in torch.Tensor._make_subclass")
    with torch.no_grad():
        # Detached last, for a view that is made without gradients could not be changed in place later.
        made = as_plain(data).detach()
    return _in_class(made, cls).requires_grad_(requires_grad)


def install() -> None:
    """Lets remote tensors be of the user's classes.

    Raises:
        ConfigurationError: this torch's tensors have no subclasses as skyproxy knows them.
    """
    patching.require(torch.Tensor, "as_subclass")
    patching.require(torch._tensor, "_rebuild_from_type_v2")
    RemoteTensor.as_subclass = as_subclass  # type: ignore[method-assign,assignment]
    patching.replace(
        torch.Tensor,
        "_make_subclass",
        staticmethod(_make_subclass),
        why="PyTorch's own aborts where the class and the tensor both have Python dispatch",
        test="tests/tensor/torch_api/test_subclasses.py::test_an_operation_gives_what_it_gives_on_the_cpu",
    )
