"""What code depends on is found in its bytecode, or it is said that this cannot be told."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.dispatch.dependencies import Reader, reader_of

PACKAGE = __name__.partition(".")[0]
FACTOR = 2.0
TABLE = [1.0]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def attend(
    module: nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.1,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.matmul(query, query.transpose(0, 1)) * scaling
    if mask is not None:
        weights = weights + mask[:, : len(query)]
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return doubled(weights), weights


class Module(nn.Module):
    bias = 3
    function = staticmethod(doubled)

    @property
    def counted(self) -> int:
        self.count = getattr(self, "count", 0) + 1
        return self.count

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x


def reader(function: Callable[..., Any], kind: type = Module) -> tuple[Reader, tuple[object, ...]]:
    found = reader_of(function, PACKAGE, kind)
    assert found is not None
    return found


def test_arguments_attributes_and_names_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    read, usual = reader(attend)
    module, query, mask = Module().eval(), object(), object()
    values, found = read(module, query, None, scaling=0.5, position_ids=object())
    assert set(values) == {query, None, 0.5, 0.1, False}
    functional = nn.functional
    assert {torch.matmul, torch.float32, functional.softmax, functional.dropout, doubled, FACTOR} <= set(usual)
    assert found == usual
    module.train()
    assert set(read(module, query, mask, 0.5, dropout=0.25)[0]) == {query, mask, 0.5, 0.25, True}
    for owner, name in ((functional, "softmax"), (torch, "matmul"), (RemoteTensor, "transpose"), (torch.Tensor, "to")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, doubled)
            assert read(module, query, None, 0.5)[1] != usual, name
            assert reader_of(attend, "elsewhere", Module) is None  # `doubled` may do anything there
            assert owner is not torch.Tensor or reader_of(attend, PACKAGE, Module) is None  # and is a program's
    for function in (attend, doubled):
        for name, part in (("__code__", prints.__code__), ("__defaults__", (0.5,)), ("__kwdefaults__", {"x": 1})):
            with monkeypatch.context() as patched:
                patched.setattr(function, name, part)
                assert read(module, query, None, 0.5)[1] != usual, name
    assert read(module, query, None, 0.5)[1] == usual
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert read(module, query, None, 0.5)[1] != usual


def test_wrong_arguments_are_refused_as_the_function_does() -> None:
    read, _ = reader(attend)
    with pytest.raises(TypeError):
        read(Module())
    with pytest.raises(AttributeError):
        read(object(), torch.ones(2), None, 1.0)


def test_a_function_without_a_module_depends_on_its_arguments_and_names() -> None:
    found = reader_of(doubled, PACKAGE)
    assert found is not None
    x = object()
    assert found[0](x)[0] == (x,)
    assert FACTOR in found[1]


def stores_on_the_module(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.seen = x
    return x * 2


def calls_a_function_of_the_module(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.function(x)
    return found


def reads_an_attribute_of_a_function(module: Any, x: torch.Tensor) -> Any:
    return x * doubled.factor  # type: ignore[attr-defined]


def keeps_a_function_for_later(module: Any, x: torch.Tensor) -> Any:
    later: Any = doubled
    return x * later.factor


def reads_a_property(module: Any, x: torch.Tensor) -> Any:
    return x * module.counted


def passes_the_module_on(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * getattr(module, "bias", 1)


def takes_whatever_is_named(module: Any, x: torch.Tensor, **named: Any) -> Any:
    return x * named.get("factor", 1)


def takes_whatever_is_given(module: Any, x: torch.Tensor, *more: Any) -> Any:
    return x * len(more)


def reads_a_table(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * TABLE[0]


def writes_a_table(module: Any, x: torch.Tensor) -> torch.Tensor:
    x[0] = 1
    return x


def prints(module: Any, x: torch.Tensor) -> torch.Tensor:
    print(x)
    return x


def draws_a_number(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def asks_for_the_time(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * time.time()


def makes_an_object(module: Any, x: torch.Tensor) -> Any:
    return Scale(x)


def seeds_the_generators(module: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x


def changes_a_mode(module: Any, x: torch.Tensor) -> torch.Tensor:
    torch._C._set_grad_enabled(False)
    return x


def has_a_function_of_its_own(module: Any, x: torch.Tensor) -> torch.Tensor:
    return (lambda y: y * 2)(x)


def calls_what_depends_on_more(module: Any, x: torch.Tensor) -> torch.Tensor:
    return reads_a_table(module, x)


def imports(module: Any, x: torch.Tensor) -> Any:
    import math

    return x * math.pi


def changes_a_name(module: Any, x: torch.Tensor) -> Any:
    global FACTOR
    FACTOR = 4.0
    return x


@pytest.mark.parametrize(
    "function",
    [
        stores_on_the_module,
        calls_a_function_of_the_module,
        reads_an_attribute_of_a_function,
        keeps_a_function_for_later,
        reads_a_property,
        passes_the_module_on,
        takes_whatever_is_named,
        takes_whatever_is_given,
        reads_a_table,
        writes_a_table,
        prints,
        draws_a_number,
        asks_for_the_time,
        makes_an_object,
        seeds_the_generators,
        changes_a_mode,
        has_a_function_of_its_own,
        calls_what_depends_on_more,
        imports,
        changes_a_name,
        lambda: None,
        torch.add,
    ],
)
def test_what_the_bytecode_does_not_tell_has_no_reader(function: Callable[..., Any]) -> None:
    assert reader_of(function, PACKAGE, Module) is None


class Scale(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.unused = object()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(x)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.eps


def test_methods_of_the_module_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    read, usual = reader(Scale.forward, Scale)
    module, x = Scale(1e-6), object()
    assert read(module, x) == ((x, 1e-6), usual)

    class Further(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.eps

    read, usual = reader(Scale.forward, Further)  # as the method is called by that of the other class
    assert read(Further(0.5), x) == ((x, 0.5), usual)

    def other(self: Scale, x: torch.Tensor) -> torch.Tensor:
        return x

    with monkeypatch.context() as patched:
        patched.setattr(Scale, "_scaled", other)
        assert read(Further(0.5), x)[1] != usual
    module._scaled = doubled  # type: ignore[method-assign]
    with pytest.raises(AttributeError):
        read(module, x)


def test_attributes_that_code_gives_have_no_reader() -> None:
    class Computed(Scale):
        @property
        def eps(self) -> float:
            return 1.0

        @eps.setter
        def eps(self, value: float) -> None: ...

    class Intercepted(Scale):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

    class Foreign(Scale):
        _scaled = torch.relu  # type: ignore[assignment]

    assert all(reader_of(Scale.forward, PACKAGE, kind) is None for kind in (Computed, Intercepted, Foreign))
