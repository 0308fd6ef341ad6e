"""Remote tensors of the user's own classes behave as those of the CPU do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import skyproxy  # noqa: F401  (registers the device)


class Counted(torch.Tensor):
    """A class with a `__torch_function__` that hands on an attribute, as those of fastai and torchvision do."""

    calls = 0
    label = "none"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert cls is Counted
        assert all(issubclass(cls, kind) for kind in types)
        Counted.calls += 1
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Counted) and args and isinstance(args[0], Counted):
            result.label = args[0].label
        return result

    def shout(self) -> str:
        return self.label.upper()


class Bare(torch.Tensor):
    pass


class Heir(torch.Tensor):
    """A class whose results take over the whole `__dict__`, as fastai's `TensorBase.set_meta` has it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Heir) and args and isinstance(args[0], Heir):
            result.__dict__ = copy.copy(args[0].__dict__)
        return result


class Updated(torch.Tensor):
    """A class whose results are given each attribute of their first operand."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Updated) and args and isinstance(args[0], Updated):
            result.__dict__.update(args[0].__dict__)
        return result


class Named(torch.Tensor):
    """A class whose results are given each attribute of their first operand by its name."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Named) and args and isinstance(args[0], Named):
            for name, value in vars(args[0]).items():
                setattr(result, name, value)
        return result


class Labelled:
    """No tensor: its instances have a `__dict__` of their own kind."""

    def take_label(self, other: Any) -> Any:
        self.__dict__ = {name: other.__dict__[name] for name in other.__dict__.keys()}  # noqa: SIM118  (as MONAI does)
        return self


class Mixed(Labelled, torch.Tensor):
    """A class whose first base is no tensor, as that of MONAI's images."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Mixed) and args and isinstance(args[0], Mixed):
            result.take_label(args[0])
        return result


def make(cls: type[Any], device: str) -> Any:
    return torch.arange(4.0).to(device).as_subclass(cls)


def described(value: Any) -> Any:
    """The class and the numbers of every tensor in a result."""
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    kind = next(c.__name__ for c in (Counted, Bare, torch.nn.Parameter, torch.Tensor) if isinstance(value, c))
    return kind, value.requires_grad, value.detach().cpu().tolist()


def trained(cls: type[Any], device: str) -> Any:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(3).as_subclass(cls))
    module.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (module.weight**2).sum().backward()
        optimizer.step()
    return module.weight, module.weight.grad is not None, module.state_dict()["weight"]


def loaded(cls: type[Any], device: str) -> Any:
    file = io.BytesIO()
    torch.save(make(cls, device), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CASES: dict[str, Callable[[type[Any], str], Any]] = {
    "arithmetic": lambda cls, d: make(cls, d) * 2 + 1,
    "mixed with a plain tensor": lambda cls, d: torch.ones(4, device=d) + make(cls, d),
    "reduction": lambda cls, d: make(cls, d).sum(),
    "view": lambda cls, d: make(cls, d).view(2, 2)[1],
    "several results": lambda cls, d: tuple(make(cls, d).sort(descending=True)),
    "list": lambda cls, d: torch.cat([make(cls, d), torch.ones(1, device=d)]),
    "unbind": lambda cls, d: list(make(cls, d).unbind()),
    "foreach": lambda cls, d: list(torch._foreach_add([make(cls, d), make(cls, d)], 1.0)),
    "in place": lambda cls, d: make(cls, d).add_(1),
    "resize in place": lambda cls, d: make(cls, d).unsqueeze_(0),
    "out": lambda cls, d: torch.add(make(cls, d), 1, out=make(cls, d)),
    "index": lambda cls, d: make(cls, d)[make(cls, d) > 1],
    "value": lambda cls, d: make(cls, d)[2].item(),
    "numbers": lambda cls, d: make(cls, d).tolist(),
    "attention": lambda cls, d: functional.scaled_dot_product_attention(*[make(cls, d).view(1, 1, 2, 2)] * 3),
    "linear": lambda cls, d: functional.linear(make(cls, d).view(2, 2), torch.eye(2, device=d)),
    "softmax": lambda cls, d: functional.softmax(make(cls, d), 0),
    "make_subclass": lambda cls, d: torch.Tensor._make_subclass(cls, torch.ones(2, device=d), True),
    "parameter": lambda cls, d: torch.nn.Parameter(make(cls, d)),
    "new": lambda cls, d: make(cls, d).new_zeros(2),
    "to the device": lambda cls, d: torch.arange(3.0).as_subclass(cls).to(d),
    "to the CPU": lambda cls, d: make(cls, d).cpu(),
    "to another dtype": lambda cls, d: make(cls, d).half(),
    "clone and detach": lambda cls, d: make(cls, d).clone().detach(),
    "back to a tensor": lambda cls, d: make(cls, d).as_subclass(torch.Tensor),
    "pickle": lambda cls, d: pickle.loads(pickle.dumps(make(cls, d))),
    "save and load": loaded,
    "deepcopy of a parameter": lambda cls, d: copy.deepcopy(torch.nn.Parameter(make(cls, d).as_subclass(cls))),
    "training": trained,
    "inference mode": lambda cls, d: torch.inference_mode()(
        lambda: make(cls, d).view(2, 2) @ make(cls, d).view(2, 2)
    )(),
}


@pytest.mark.parametrize("cls", [Counted, Bare])
@pytest.mark.parametrize("name", CASES)
def test_an_operation_gives_what_it_gives_on_the_cpu(name: str, cls: type[Any], sky1: str) -> None:
    if name == "deepcopy of a parameter":  # PyTorch wants a `new_empty` of such classes; on sky it works without
        assert described(CASES[name](cls, sky1)) == (cls.__name__, True, [0, 1, 2, 3])
        return
    assert described(CASES[name](cls, sky1)) == described(CASES[name](cls, "cpu"))


def test_a_subclass_keeps_its_methods_and_attributes(sky1: str) -> None:
    x = make(Counted, sky1)
    x.label = "mask"
    before = Counted.calls
    assert (x + 1).shout() == x.view(2, 2).shout() == "MASK"
    assert Counted.calls > before
    assert copy.deepcopy(x).shout() == pickle.loads(pickle.dumps(x)).shout() == "MASK"
    assert repr(make(Bare, sky1)) == "Bare([0., 1., 2., 3.], device='sky:1')"


def test_a_subclass_shares_memory_and_history_with_its_tensor(sky1: str) -> None:
    x = torch.ones(3, device=sky1, requires_grad=True)
    y = x.as_subclass(Counted)
    assert y.data_ptr() == x.data_ptr()
    (y * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]
    with torch.no_grad():
        y.add_(1)
    assert x.tolist() == [2, 2, 2]


def test_what_make_subclass_gives_is_a_leaf_that_can_be_changed(sky1: str) -> None:
    x = torch.Tensor._make_subclass(Bare, torch.ones(3, device=sky1), True)
    assert not x._is_view()
    x.detach().add_(1)
    assert x.is_leaf
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4, 4]


def test_a_class_that_refuses_every_function_can_be_made(sky1: str) -> None:
    class Closed(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    x = torch.Tensor._make_subclass(Closed, torch.ones(3, device=sky1), True)
    with torch._C.DisableTorchFunctionSubclass():
        assert x.requires_grad
        assert x.is_leaf


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(4, 2),
        lambda: torch.nn.Conv1d(3, 4, 2, padding=1),
        lambda: torch.nn.GRU(4, 3, batch_first=True),
        lambda: torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.GroupNorm(1, 3)),
    ],
    ids=["linear", "convolution", "recurrent", "norms"],
)
def test_gradients_of_each_sample_are_those_of_the_cpu(make: Callable[[], torch.nn.Module], sky1: str) -> None:
    torch.manual_seed(0)
    local, x = make(), torch.randn(5, 3, 4)
    found: list[list[torch.Tensor]] = []
    for module, device in ((copy.deepcopy(local).to(sky1), sky1), (local, "cpu")):
        y = call_for_per_sample_grads(module, batch_size=5)(x.to(device))
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        found.append([p.grad_sample.cpu() for p in module.parameters()])
    assert all(map(torch.equal, *found))


def test_a_class_that_handles_operations_itself_is_refused(sky1: str) -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match="cannot be a Own, which has its own __torch_dispatch__"):
        torch.ones(1, device=sky1).as_subclass(Own)


@pytest.mark.parametrize("cls", [int, dict])
def test_what_is_no_class_of_tensors_is_refused_as_on_the_cpu(cls: type[Any], sky1: str) -> None:
    with pytest.raises(TypeError, match="does not inherit from Tensor"):
        torch.ones(2, device=sky1).as_subclass(cls)


def test_data_of_another_class_leaves_the_class(sky1: str) -> None:
    x, plain = torch.ones(3, device=sky1).as_subclass(Counted), torch.zeros(2, device=sky1)
    x.data, plain.data = plain, x.detach()
    assert isinstance(x, Counted)
    assert not isinstance(plain, Counted)
    assert x.as_subclass(torch.Tensor).tolist() == [0, 0]
    assert plain.tolist() == [1, 1, 1]


HANDED_ON: list[Callable[[Any], Any]] = [
    lambda x: x + 1,
    lambda x: x * x,
    lambda x: x[1:],
    lambda x: x.view(2, 2).T,
    lambda x: x.sum(),
    lambda x: x.add_(1),
    lambda x: x[x > 1],
    lambda x: torch.cat([x, x]),
    lambda x: x.to(torch.float64),
    lambda x: x.to("cpu") + 1,
    lambda x: x.cpu().to("sky:0") + 1,
    lambda x: x.clone().resize_(2),
    lambda x: functional.relu(x - 2),
    lambda x: x.detach().requires_grad_() * 2,
    lambda x: pickle.loads(pickle.dumps(x + 1)),
    lambda x: x.as_subclass(torch.Tensor) - 1,
]


@pytest.mark.parametrize("cls", [Heir, Updated, Named, Mixed])
@pytest.mark.parametrize("operation", HANDED_ON)
def test_attributes_are_handed_on_and_values_are_not(cls: type[Any], operation: Callable[[Any], Any]) -> None:
    results = []
    for device in ("cpu", "sky:0"):
        x = make(cls, device)
        x.label = "photo"
        result = operation(x)
        results.append((result.detach().cpu().as_subclass(torch.Tensor).tolist(), getattr(result, "label", None)))
        results.append((x.cpu().as_subclass(torch.Tensor).tolist(), result.shape, result.stride()))
    assert results[:2] == results[2:]


@pytest.mark.parametrize("cls", [Bare, Mixed])
def test_the_dict_of_a_tensor_holds_what_its_user_set(cls: type[Any]) -> None:
    x = make(cls, "sky:0")
    assert vars(x) == {}
    assert len(vars(x)) == 0
    assert "_sky" not in x.__dict__
    x.label = "photo"
    assert dict(vars(x)) == {**vars(x)} == x.__dict__.copy() == copy.deepcopy(vars(x)) == {"label": "photo"}
    assert repr(vars(x)) == "{'label': 'photo'}"
    assert list(x.__dict__) == ["label"] == list(vars(x).keys())
    assert list(vars(x).values()) == ["photo"]
    assert vars(x) | {"a": 1} == {"label": "photo", "a": 1}
    vars(x)["size_there"] = 3
    assert x.size_there == 3
    vars(x).clear()
    assert not hasattr(x, "label")
    assert x.tolist() == [0, 1, 2, 3]


def test_two_tensors_of_a_class_are_swapped() -> None:
    a, b, plain = make(Bare, "sky:0"), make(Bare, "sky:0") + 1, torch.ones(2)
    a.label, b.label = "a", "b"
    torch.utils.swap_tensors(a, b)
    assert (a.tolist(), a.label, b.tolist(), b.label) == ([1, 2, 3, 4], "b", [0, 1, 2, 3], "a")
    torch.utils.swap_tensors(a, plain)
    assert (a.tolist(), plain.tolist(), plain.label) == ([1, 1], [1, 2, 3, 4], "b")
    assert type(plain).__name__ == "Bare"
    assert type(a) is torch.Tensor


class Called(torch.Tensor):
    """Made by a call, as in PyTorch's notes about extending it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.label = "of " + type(data).__name__


class Scaled(torch.Tensor):
    def __new__(cls, data: torch.Tensor) -> Scaled:
        return super().__new__(cls, data * 2)


@pytest.mark.parametrize("cls", [Called, Scaled, Heir])
def test_a_class_is_called_with_a_tensor(cls: type[Any], sky1: str) -> None:
    found = []
    for place in ("cpu", sky1):
        x = torch.arange(3.0).to(place).requires_grad_()
        memory = x.detach()
        made = cls(x)
        assert isinstance(made, cls)
        assert made.device == torch.device(place)
        (made * made).sum().backward()
        memory.add_(1)
        again = cls(made)
        assert isinstance(again + 1, cls)
        found.append((made.tolist(), again.tolist(), x.grad.tolist() if x.grad is not None else None, made.is_leaf))
    assert found[0] == found[1]


@pytest.mark.parametrize("cls", [Counted, Bare])
def test_a_tensors_class_has_the_users_place_in_tables_and_pickles(cls: type[Any], sky1: str) -> None:
    """As torchvision's `ToDtype({Image: torch.float32, Mask: torch.int64})` and its tests have it."""
    kind = type(torch.ones(2, device=sky1).as_subclass(cls))
    assert {Heir: 1, cls: 2}[kind] == 2
    assert {kind: 3}[cls] == 3
    assert kind == cls
    assert kind != Heir
    assert kind not in (torch.Tensor, type(torch.ones(2, device=sky1)))
    assert pickle.loads(pickle.dumps([kind])) == [cls]
    assert pickle.loads(pickle.dumps(kind)) is cls
    assert copy.deepcopy(kind) is kind


def test_what_derives_from_a_tensors_class_is_a_class_of_its_own(sky1: str) -> None:
    kind = type(torch.ones(2, device=sky1).as_subclass(Bare))
    derived = type("derived", (kind,), {"__module__": __name__})
    assert derived != kind
    assert len({derived: 1, kind: 2, Bare: 3}) == 2
    with pytest.raises(pickle.PicklingError, match="derived"):
        pickle.dumps(derived)


def test_methods_of_plain_tensors_are_called_with_remote_ones(sky1: str) -> None:
    found = []
    for place in ("cpu", sky1):
        x = torch.arange(3.0).to(place)
        made = torch.Tensor.as_subclass(x, Called)
        plain = torch.Tensor.as_subclass(made, torch.Tensor)
        assert (type(made).__name__, isinstance(made, Called), isinstance(plain, Called)) == ("Called", True, False)
        found.append([torch.Tensor.tolist(y) for y in (x, made, plain)])
    assert found[0] == found[1]


IN_THE_CLASS_OF = {
    "as_subclass": lambda local, x: local.as_subclass(type(x)),
    "as_subclass, by name": lambda local, x: local.as_subclass(cls=type(x)),
    "with a history": lambda local, x: (local.clone().requires_grad_() * 2).as_subclass(type(x)),
    "elsewhere": lambda local, x: local.to("meta").as_subclass(type(x)).new_zeros(2, device="cpu"),
    "_make_subclass": lambda local, x: torch.Tensor._make_subclass(type(x), local, True),
    "called with a tensor": lambda local, x: type(x)(local),
    "called with numbers": lambda local, x: type(x)([1.0, 2.0]),
}


@pytest.mark.parametrize("cls", [torch.Tensor, Bare, Counted])
@pytest.mark.parametrize("act", IN_THE_CLASS_OF.values(), ids=list(IN_THE_CLASS_OF))
def test_local_tensors_in_the_class_of_remote_ones_are_as_of_local_ones(
    act: Callable[..., torch.Tensor], cls: type[Any], sky1: str
) -> None:
    """As fastai puts what it copied to the CPU back in the class of what it copied."""
    found = []
    for place in ("cpu", sky1):
        made = act(torch.arange(3.0), torch.ones(2, device=place).as_subclass(cls))
        found.append((type(made), str(made.device), made.requires_grad, made.is_leaf, made.numpy(force=True).tolist()))
    assert found[0] == found[1]


class Factor(nn.Parameter):
    """A parameter with a method and an attribute."""

    tag: int

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, tag: int = 0) -> Factor:  # type: ignore[misc]
        made = super().__new__(cls, data, requires_grad)
        made.tag = tag
        return made

    def doubled(self) -> torch.Tensor:
        return self * 2


def described_parameter(parameter: Any) -> list[object]:
    kinds = [isinstance(parameter, kind) for kind in (Factor, nn.Parameter, torch.Tensor)]
    results = [type(x) is type(torch.ones(1, device=parameter.device)) for x in (parameter + 1, parameter.detach())]
    return [type(parameter).__name__, kinds, parameter.tag, parameter.doubled().tolist(), parameter.is_leaf, results]


@pytest.mark.parametrize("move", ["made there", "Module.to", "data", "there and back", "a copy", "optimizer"])
def test_a_parameter_of_a_class_stays_one(move: str, sky1: str) -> None:
    found = []
    for place in ("cpu", sky1):
        module = nn.Module()
        where = place if move == "made there" else "cpu"
        module.factor = factor = Factor(torch.arange(3.0, device=where), tag=5)
        if move == "data":
            factor.data = torch.arange(3.0, device=place)
        else:
            module.to(place)
        if move == "there and back":
            module.cpu()
        elif move == "a copy":
            module = copy.deepcopy(module)
            module.factor.tag = 5  # as on the CPU, a copy has no attributes
        elif move == "optimizer":
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            module.factor.doubled().sum().backward()
            optimizer.step()
        if move != "a copy":
            assert module.factor is factor
        assert list(dict(module.named_parameters())) == ["factor"]
        found.append([*described_parameter(module.factor), module.factor.device.type == "cpu"])
    assert found[0][:-1] == found[1][:-1]
    assert found[1][-1] == (move == "there and back")


def test_parameters_of_a_class_are_saved(sky1: str) -> None:
    found = []
    for place in ("cpu", sky1):
        values = torch.arange(3.0, device=place)
        file = io.BytesIO()
        torch.save(
            [Factor(values, tag=5), nn.Parameter(values.as_subclass(Counted)), values.as_subclass(Counted)], file
        )
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert {x.device for x in loaded} == {torch.device(place)}
        found.append([(isinstance(x, nn.Parameter), x.tolist(), x.requires_grad) for x in loaded])
    assert found[0] == found[1]


def _beside_fakes(device: str) -> list[object]:
    """What a traced function and two fake modes make of a tensor that is no fake, and what it holds then."""
    known = torch.arange(3.0).to(device)
    traced = make_fx(lambda x: x * 2 + known.sin(), tracing_mode="fake", _allow_non_fake_inputs=True)(known)
    said: list[object] = [[node.name for node in traced.graph.nodes], traced(known).tolist()]
    for allowed in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=allowed) as mode:
            fake = mode.from_tensor(torch.ones(3, device="meta")).to(device)
            for attempt in (lambda: known + 1, lambda: known.add_(1), lambda fake=fake: fake * known):
                try:
                    said.append(type(attempt()).__name__.replace("RemoteTensor", "Tensor"))
                except AssertionError as error:
                    said.append(str(error).partition(" Found in")[0])
    return [*said, known.tolist()]


def test_a_fake_mode_takes_remote_tensors_as_plain_ones(sky1: str) -> None:
    """Modes that allow tensors which are no fakes make fakes of them; others refuse them; none changes their values."""
    assert _beside_fakes(sky1) == _beside_fakes("cpu")
