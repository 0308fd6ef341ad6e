"""Remote tensors of the user's own classes: `as_subclass`, and what `torch.Tensor._make_subclass` makes.

A tensor has one Python class, and that of remote tensors is taken. So for each class of the user's there is one that is
both, made when it is first wanted. The user's `__torch_function__` sees its own class, never ours; below it, for the
time of one operation, such a tensor is a plain remote tensor.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from skyproxy import patching
from skyproxy.tensor.core.attributes import exchange_dicts, user_attributes
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import OWN_CLASSES, RemoteTensor, is_wrapper_class
from skyproxy.tensor.core.torch_private import OpOverload, fake_tensors

_disabled = torch._C._disabled_torch_function_impl
_make_plain_subclass = torch.Tensor._make_subclass
_new_plain_tensor = torch.Tensor.__new__
_rebuild_code = torch._tensor._rebuild_from_type_v2.__code__
_joined: dict[type, type] = {}


class RemoteSubclass(RemoteTensor):
    """The common part of the classes that are made here.

    Attributes:
        local_class: the user's class.
    """

    local_class: type

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        found: list[tuple[RemoteTensor, type]] = []
        for a in (*args, *(kwargs or {}).values()):
            for item in a if isinstance(a, list | tuple) else (a,):
                if isinstance(item, RemoteSubclass):
                    found.append((item, type(item)))
        try:
            for item, _ in found:
                item.__class__ = RemoteTensor
            return RemoteTensor.__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            for item, kind in found:
                item.__class__ = kind

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        rebuild, parts = as_plain(self).__reduce_ex__(protocol)
        state = dict(self.__dict__)
        if isinstance(self, torch.nn.Parameter):
            state["_is_param"] = True  # by which PyTorch knows parameters of other classes than its own
        return torch._tensor._rebuild_from_type_v2, (rebuild, self.local_class, parts, state)

    def __deepcopy__(self, memo: dict[object, object]) -> object:
        if id(self) not in memo:
            copied = RemoteTensor.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
            copied.__class__ = type(self)
            memo[id(self)] = copied
        return memo[id(self)]


@functools.cache
def _joined_metaclass(kind: type[type]) -> type[type]:
    """Make the class of classes that stand for the user's classes of a kind where remote tensors are of them."""

    class Joined(kind):  # type: ignore[misc,valid-type]
        """A class that equals the user's, so that tables of the user's classes have a place for it."""

        def __eq__(cls, other: object) -> bool:
            return local_class(cls) is local_class(other)

        def __hash__(cls) -> int:
            local = local_class(cls)
            return super().__hash__() if local is cls else hash(local)

        def __call__(cls, *args: object, **kwargs: object) -> object:
            local = local_class(cls)
            return super().__call__(*args, **kwargs) if local is cls else local(*args, **kwargs)

    copyreg.pickle(Joined, _reduce_class)  # type: ignore[arg-type]
    return Joined


def local_class(cls: Any) -> Any:
    """Return the user's class that a class made here stands for; anything else itself, also what derives from one."""
    return vars(cls).get("local_class", cls) if isinstance(cls, type) else cls


def _reduce_class(cls: type) -> str | tuple[object, ...]:
    local = local_class(cls)
    return cls.__qualname__ if local is cls else (copy.copy, (local,))  # a copy of a class is the class


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
        # By itself, for a base of the user's class that is no tensor has a `__dict__` that would come before ours.
        "__dict__": vars(RemoteTensor)["__dict__"],
    }
    reduce: object = getattr(cls, "__reduce_ex__")  # noqa: B009 - its type is narrower than it is
    if reduce is torch.nn.Parameter.__reduce_ex__:  # which would take the handle along
        members["__reduce_ex__"] = RemoteTensor.__reduce_ex__
    made = _joined_metaclass(type(cls))(cls.__name__, (cls, RemoteSubclass), members)  # type: ignore[arg-type]
    return _joined.setdefault(cls, made)


def class_of_user(tensor: torch.Tensor) -> type | None:
    """Return the class of the user's that a tensor is of; None also for one that handles operations itself."""
    kind: type = local_class(type(tensor))
    return None if kind in _OF_PYTORCH or kind in OWN_CLASSES or is_wrapper_class(kind) else kind


_OF_PYTORCH = frozenset(
    {torch.Tensor, torch.nn.Parameter, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer}
)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same remote tensor as one of no class of the user's; shares its history."""
    with torch._C.DisableTorchFunctionSubclass():
        plain: torch.Tensor = torch.ops.aten.alias.default(tensor)
    return plain


def as_subclass(self: torch.Tensor, cls: type[Any]) -> torch.Tensor:
    """`Tensor.as_subclass` of a remote tensor."""
    if cls is torch.Tensor and type(self) is RemoteTensor and sys._getframe(1).f_code is _rebuild_code:
        return self  # PyTorch makes a tensor with attributes anew, and looks whether it is of the class that it was
    if not issubclass(cls, torch.Tensor):
        _make_plain_subclass(cls, torch.empty(0, device="cpu"))  # which refuses it in PyTorch's words
    return put_in_class(as_plain(self), cls)


def put_in_class(tensor: torch.Tensor, cls: type) -> torch.Tensor:
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
        plain: torch.Tensor = _make_plain_subclass(_class_elsewhere(cls), data, requires_grad, **kwargs)
        return plain
    if any(kwargs.values()):
        raise NotImplementedError(f"a remote tensor takes no {', '.join(kwargs)} in torch.Tensor._make_subclass")
    with torch.no_grad():
        # Detached last, for a view that is made without gradients could not be changed in place later.
        # Before it is of the class, whose `__torch_function__` PyTorch does not ask here and which may refuse.
        made = as_plain(data).detach().requires_grad_(requires_grad)
    return put_in_class(made, cls)


def _class_elsewhere(cls: Any) -> Any:
    """Return what a tensor that is not remote becomes in the class of a remote one: `x.cpu().as_subclass(type(x))`."""
    cls = local_class(cls)
    return torch.Tensor if cls is RemoteTensor else cls


def _for_remote(name: str, plain: Callable[..., object]) -> Callable[..., object]:
    """Return a function of `torch.Tensor` that calls a remote tensor's method of that name."""

    @functools.wraps(plain)
    def call(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        if isinstance(self, RemoteTensor):
            return vars(RemoteTensor)[name](self, *args, **kwargs)
        classes = {key: _class_elsewhere(value) for key, value in kwargs.items()}
        return plain(self, *map(_class_elsewhere, args), **classes)  # of the two, `as_subclass` alone takes something

    return call


def _new_tensor(cls: type[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.Tensor.__new__`: `Class(tensor)`, also of a remote tensor, is another one on the same memory."""
    if len(args) == 1 and isinstance(args[0], RemoteTensor) and not kwargs and cls is not torch.Tensor:
        return put_in_class(as_plain(args[0]), cls)
    made: torch.Tensor = _new_plain_tensor(_class_elsewhere(cls), *args, **kwargs)
    return made


# Dynamo's stand-in for both has this one, and Dynamo compares.
_new_tensor.__signature__ = inspect.signature(_make_subclass)  # type: ignore[attr-defined]


def _swapping(swap_tensors: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(swap_tensors)
    def swap_all(t1: torch.Tensor, t2: torch.Tensor) -> None:
        swap_tensors(t1, t2)
        if isinstance(t1, RemoteTensor) and isinstance(t2, RemoteTensor):
            # It swapped what `__dict__` shows. That once more, and then all.
            t1.__dict__, t2.__dict__ = user_attributes(t2), user_attributes(t1)
            exchange_dicts(t1, t2)

    return swap_all


def _taking_own(is_foreign: Callable[[object], bool]) -> Callable[[object], bool]:
    """Have fake modes take remote tensors as plain ones, for which they make fakes, or which they refuse."""

    def is_foreign_class(argument: object) -> bool:
        return type(argument) not in OWN_CLASSES and is_foreign(argument)

    return is_foreign_class


def _install_for_devices() -> None:
    if not patching.is_replaced(fake_tensors, "_check_for_subclass_arg"):
        patching.wrap(
            fake_tensors,
            "_check_for_subclass_arg",
            _taking_own,
            why="fake modes leave classes with a dispatch of their own alone: operations on remote tensors ran there",
            test="tests/tensor/torch_api/test_subclasses.py::test_a_fake_mode_takes_remote_tensors_as_plain_ones",
            when=patching.When.FIRST_DEVICE,
        )
    if not patching.is_replaced(torch.Tensor, "__new__"):
        patching.replace(
            torch.Tensor,
            "__new__",
            staticmethod(_new_tensor),
            why="PyTorch's own refuses a tensor whose class is another",
            test="tests/tensor/torch_api/test_subclasses.py::test_a_class_is_called_with_a_tensor",
            when=patching.When.FIRST_DEVICE,
        )
    for name in ("as_subclass", "tolist"):
        if not patching.is_replaced(torch.Tensor, name):
            patching.wrap(
                torch.Tensor,
                name,
                functools.partial(_for_remote, name),
                why="`torch.Tensor.tolist(x)` does not ask `x` for its own method, and refuses other classes",
                test="tests/tensor/torch_api/test_subclasses.py::test_methods_of_plain_tensors_are_called_with_remote_ones",
                when=patching.When.FIRST_DEVICE,
            )
    if not patching.is_replaced(torch.utils, "swap_tensors"):
        patching.wrap(
            torch.utils,
            "swap_tensors",
            _swapping,
            why="it swaps what the `__dict__` of two tensors shows, which the handles of remote tensors are no part of",
            test="tests/tensor/torch_api/test_subclasses.py::test_two_tensors_of_a_class_are_swapped",
            when=patching.When.FIRST_DEVICE,
        )


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
    DEVICES.before_new[_install_for_devices] = None
