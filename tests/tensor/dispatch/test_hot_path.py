"""The fast path takes a call as the careful path does: both build the same key of the shape cache, type by type."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from skyproxy.errors import LimitExceededError, UnsupportedOpError
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import rule_registry
from skyproxy.tensor.dispatch import hot_path, recording
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.op_info import info_of
from tests.conformance.op_checks import settle
from tests.conformance.twins import Twins, tree_differences
from tests.operator_database import op_db

EVERY = 10
"""One entry in so many of the operator database; the sweep over all of it takes minutes."""


class _Cache(dict[Any, Any]):
    """A shape cache that notes the keys it is asked for."""

    def __init__(self, entries: dict[Any, Any], asked: list[Any]) -> None:
        super().__init__(entries)
        self._asked = asked

    def get(self, key: Any, default: Any = None) -> Any:
        self._asked.append(key)
        return super().get(key, default)


class _Comparison:
    """Compares the keys of both paths, call by call.

    Attributes:
        compared: names of the ops that the fast path took.
        different: for each call whose keys differ, the op and both keys.
    """

    def __init__(self) -> None:
        self.compared: list[str] = []
        self.different: list[tuple[str, Any, Any]] = []
        self._taken = True

    def call(self, cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch a call by the fast path, and compare its key with the careful path's."""
        devices = {id(a._sky.device): a._sky.device for a in args if type(a) is RemoteTensor}
        info = info_of(func)
        if info.special is not None or len(devices) != 1:
            return hot_path.dispatch_remote(cls, func, types, args, kwargs)
        (device,) = devices.values()
        asked: list[Any] = []
        plain = device.cache
        device.cache = _Cache(plain, asked)
        fast: Any = None

        def record(*call: Any) -> Any:
            nonlocal fast
            fast = asked[0] if asked else None
            device.cache = plain
            return hot_path_record(*call)

        hot_path_record, hot_path.record = hot_path.record, record
        try:
            careful = _key(info, args, kwargs or {})
            asked.clear()
            result = hot_path.dispatch_remote(cls, func, types, args, kwargs)
        finally:
            hot_path.record = hot_path_record
            plain.update(device.cache)
            device.cache = plain
            fast = fast if fast is not None or not asked else asked[0]
        if fast is not None and careful is not None:
            self.compared.append(info.name)
            if _typed(fast) != _typed(careful):
                self.different.append((info.name, fast, careful))
        return result


def _key(info: Any, args: Any, kwargs: Any) -> Any:
    try:
        return tuple(BoundCall(info, args, kwargs).key)
    except Exception:  # a call that is refused has no key; dispatching it says so again
        return None


def _typed(key: Any) -> Any:
    """The key with the type of each part: 1, True and 1.0 are equal, and no two of them are the same argument."""
    return tuple(map(_typed, key)) if isinstance(key, tuple) else (type(key), key)


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> _Comparison:
    """Every operation on remote tensors is compared."""
    made = _Comparison()
    monkeypatch.setattr(RemoteTensor, "__torch_dispatch__", classmethod(made.call))
    return made


def test_both_paths_build_the_same_keys_over_the_operator_database(sky: str, comparison: _Comparison) -> None:
    entries = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")][::EVERY]
    assert len(entries) > 40
    torch.manual_seed(7)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in entries:
            for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=False))[:3]:
                arguments, keywords = Twins(sky).of(((sample.input, *sample.args), sample.kwargs))
                with contextlib.suppress(Exception):  # what an op cannot do, the conformance sweep knows
                    op(*arguments, **keywords)
            settle()
    assert comparison.different == []
    assert len(set(comparison.compared)) > 30
    assert len(comparison.compared) > 90


def test_both_paths_build_the_same_keys_for_each_kind_of_argument(sky: str, comparison: _Comparison) -> None:
    a, b = torch.ones(4, 3, device=sky), torch.zeros(4, 3, device=sky)
    a + b, a + 1, a + 1.5, a + True, a.add(b, alpha=2), a.add(b, alpha=0.5), a.add_(b)
    a.sum(), a.sum(0), a.sum([0, 1], keepdim=True), a.sum(dtype=torch.float64), a.to(torch.int32), a.clamp(min=0.5)
    a.clamp(0, None), a.view(3, 4), a.t(), a[1:], a.select(0, 1), torch.cat([a, b]), torch.stack([a] * 20)
    torch.where(a > b, a, 0.0), torch.split(a, [1, 3]), a.new_zeros(2, 2), torch.full_like(a, 3), a.var(correction=0)
    torch.nn.functional.layer_norm(a, (3,)), a.index_fill(0, torch.tensor([1], device=sky), 2), a.argmax(), a.max(0)
    torch.nn.functional.conv2d(a.view(1, 1, 4, 3), torch.ones(1, 1, 2, 2, device=sky), padding=1), a.norm(2, dim=0)
    torch._foreach_add([a, b], 1.0), torch._foreach_mul_([a.clone() for _ in range(12)], 2.0), a.cumsum(0)
    assert comparison.different == []
    assert len(comparison.compared) > 35


def test_keys_that_differ_in_a_type_only_are_told_apart(sky: str, comparison: _Comparison) -> None:
    assert _typed(("op", 1)) != _typed(("op", True))
    assert _typed(("op", (1, 2))) != _typed(("op", (1, 2.0)))
    assert _typed(("op", (1, None))) == _typed(("op", (1, None)))


def test_a_key_that_the_fast_path_builds_otherwise_is_found(
    sky: str, comparison: _Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.ones(2, 3, device=sky)
    monkeypatch.setattr(BoundCall, "_bind", _taking_constants_otherwise(BoundCall._bind))
    a.sum(1)
    assert [name for name, _, _ in comparison.different] == ["aten::sum.dim_IntList"]


def _taking_constants_otherwise(take: Any) -> Any:
    def taking(self: BoundCall, a: Any, how: int, is_written: bool) -> Any:
        template = take(self, a, how, is_written)
        if type(a) is list:
            self.key[-1] = list(a)
        return template

    return taking


def _loop_over(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [*x.unbind(0)]
    parts[1].zero_()
    pairs = x.split(2)
    pairs[-1].fill_(7)
    return [x, *parts[:3], *parts[-3:], *pairs[:2], *pairs[-2:], torch.tensor(len(parts) + len(pairs), device=x.device)]


def test_views_of_a_long_tensor_are_divided_among_operations(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MANY_TENSORS", 3)
    monkeypatch.setattr(recording, "_MOST_TENSORS", 40)
    for length in (39, 40, 61, 91):
        rows = torch.arange(2.0 * length).view(length, 2)
        assert tree_differences(_loop_over(rows.to(sky)), _loop_over(rows.clone())) == []
    with pytest.raises(LimitExceededError, match="at most 40"):
        torch.stack([torch.ones(2, device=sky)] * 41)
    assert torch.ones(2, device=sky).sum().item() == 2


def test_a_rule_that_somebody_registered_is_found(sky: str) -> None:
    find = rule_registry.find_torch_dispatch_rule
    assert find is hot_path.find_rule
    asked: list[Any] = []

    def rule(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(func)
        return hot_path.dispatch_remote(RemoteTensor, func, types, args, kwargs)

    sin = torch.ops.aten.sin.default
    assert find(sin, RemoteTensor) is None
    registration = rule_registry.singleton.find("aten::sin").torch_dispatch_rules.register(RemoteTensor, rule)
    try:
        assert find(sin, RemoteTensor) is rule
        assert find(sin, torch.Tensor) is None
        x = torch.ones(3, device=sky)
        assert torch.equal(x.sin().cpu(), torch.ones(3).sin())
        assert asked == [sin]
    finally:
        registration.destroy()
    assert find(sin, RemoteTensor) is None
    x.sin()
    assert asked == [sin]


_NUMBERS_OF_THE_CPU = [torch.tensor(n) for n in (2.5, 3, True, 1j)] + [torch.tensor(2.5, dtype=torch.float64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_a_number_of_the_cpu_takes_the_fast_path(sky: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x = torch.ones(2, 3).to(dtype)
    remote = x.to(sky)
    # No kernel computes with what torch 2.15 makes of bfloat16 and a complex number.
    numbers = [n for n in _NUMBERS_OF_THE_CPU if torch.result_type(x, n) is not getattr(torch, "bcomplex32", None)]
    with monkeypatch.context() as patched:
        patched.setattr(hot_path, "record", None)
        found = [f(remote) for n in numbers for f in _with_a_number(n) for _ in range(2)]
    expected = [f(x) for n in numbers for f in _with_a_number(n) for _ in range(2)]
    assert tree_differences(found, expected) == []


def _with_a_number(n: torch.Tensor) -> list[Any]:
    return [lambda x: x + n, lambda x: n * x, lambda x: x == n, lambda x: torch.where(x > 0, x, n)]


def _fill_targets(x: torch.Tensor) -> list[Any]:
    """Give what operations wrote into targets that have the sizes and dtypes of their results, and the targets."""
    same, row, number, columns = torch.empty_like(x), x.new_empty(len(x)), x.new_empty(()), x.new_empty(x.shape[::-1])
    positions, mask = torch.empty(len(x), dtype=torch.int64, device=x.device), torch.empty_like(x, dtype=torch.bool)
    results = [
        torch.add(x, 1, alpha=2, out=same),
        torch.gt(x, 0.5, out=mask),
        torch.sum(x, 1, out=row),
        torch.mm(x, x.t() + 1, out=x.new_empty(len(x), len(x))),
        torch.mul(x, x, out=columns.t()),
        torch.sub(same, x, out=same),
        *torch.max(x, 1, out=(row.clone(), positions)),
        torch.linalg.vector_norm(x, out=number),
    ]
    assert results[0] is same
    return [*results, same, row, number, columns, positions, mask]


def test_targets_that_fit_are_filled_on_the_fast_path(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ((7, 11), (7, 11), (11, 5)):
        x = torch.rand(size)
        remote = x.to(sky)
        with monkeypatch.context() as patched:
            patched.setattr(hot_path, "record", None)
            found = _fill_targets(remote)
        assert [t.stride() for t in found] == [t.stride() for t in _fill_targets(x)]
        assert tree_differences(found, _fill_targets(x)) == []


def test_what_fills_a_target_that_it_reads_is_refused_as_locally(sky: str) -> None:
    x, other = torch.rand(3, 3, device=sky), torch.rand(3, 3, device=sky)
    positions = torch.zeros(3, 3, dtype=torch.int64, device=sky)
    for _ in range(2):
        torch.gather(x, 0, positions, out=other)  # looks the same, and has a memory of its own
        with pytest.raises(RuntimeError, match="unsupported operation"):
            torch.gather(x, 0, positions, out=x)
    assert torch.equal(other.cpu(), x.cpu()[:1].expand(3, 3))


def test_what_is_no_number_of_the_cpu_is_told_as_before(sky: str) -> None:
    x = torch.ones(2, 3, device=sky)
    for give in (lambda n: x + n.expand(1), lambda n: n.clone().add_(x.sum()), lambda n: x.addmm_(n, x)):
        with pytest.raises(RuntimeError):
            give(torch.tensor(2.0))
    assert torch.equal((x + torch.tensor(2.0)).cpu(), torch.full((2, 3), 3.0))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_loop_over_many_elements_keeps_its_session(sky: str) -> None:
    mask = torch.ones(400_000, dtype=torch.bool, device=sky)
    parts = mask.unbind(0)
    assert len(parts) == 400_000
    assert parts[-1].item() is True


CALLS_WITH_A_SYMBOL: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "add": lambda x, n: x + n,
    "power": lambda x, n: x**n,
    "comparison": lambda x, n: x < n,
    "fill": lambda x, n: x.clone().fill_(n),
    "named": lambda x, n: x.clamp(max=n),
    "scale": lambda x, n: torch.add(x, x, alpha=n),
    "view": lambda x, n: x.view(n, 2),
    "new": lambda x, n: x.new_full((n,), n),
    "repeats": lambda x, n: x.repeat(n, n),
}


@pytest.mark.parametrize("call", CALLS_WITH_A_SYMBOL.values(), ids=CALLS_WITH_A_SYMBOL)
def test_a_symbol_travels_as_its_number_however_often_it_comes(
    call: Callable[[torch.Tensor, Any], torch.Tensor], sky1: str
) -> None:
    """As it was, it could not be sent, which ended the session and took all of its tensors."""
    shapes = ShapeEnv()
    three = shapes.create_symintnode(shapes.create_symbol(3, ConstantSource("n")), hint=3)
    constant = ShapeEnv().create_symintnode(sympy.Integer(3), hint=3)
    x = torch.arange(6.0)
    for _ in range(3):
        for n in (three, constant, 3):
            assert torch.equal(call(x.to(sky1), n).cpu(), call(x, 3))


def test_the_size_of_ragged_rows_is_refused_where_a_number_is_needed(sky1: str) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, device=sky1)
    x = torch.ones(4, device=sky1)
    n: Any = rows.shape[1]
    for _ in range(2):
        for refused in (lambda: x + n, lambda: x.clamp(0, n), lambda: x.view(n), lambda: torch.add(x, x, alpha=n)):
            with pytest.raises(UnsupportedOpError, match="the size of a dimension whose rows differ"):
                refused()
    assert x.tolist() == [1.0] * 4


class Strict(torch.Tensor):
    """A tensor that holds another one, and takes operands of its own class and plain ones, as PyTorch's guide says."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Strict:
        """Wrap `inner`, and look like it."""
        self = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op on what is wrapped, where no operand has a dispatch that this class does not know."""
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        bare = tree_map(lambda a: a.inner if isinstance(a, Strict) else a, (args, kwargs or {}))
        return tree_map(lambda r: Strict(r) if isinstance(r, torch.Tensor) else r, func(*bare[0], **bare[1]))


_BESIDE_PLAIN_ONES: dict[str, Callable[[torch.Tensor], Any]] = {
    "first": lambda x: Strict(x) + x,
    "second": lambda x: x + Strict(x),
    "in a list": lambda x: torch.cat([x, Strict(x)]),
    "in two lists": lambda x: torch._foreach_add([x, x], [Strict(x), x])[0],
    "written": lambda x: Strict(x).mul_(x),
    "copied to": lambda x: Strict(x).copy_(x + 1),
    "by a mask": lambda x: torch.where(x > 2, Strict(x), x),
    "by an index": lambda x: Strict(x)[x[:2].long()],
    "as an index": lambda x: x[Strict(x[:2].long())],
    "as weights": lambda x: torch.nn.functional.linear(x.expand(2, 4), Strict(x.expand(3, 4)), x[:3]),
    "as a keyword": lambda x: torch.add(x, Strict(x), alpha=2),
    "beside a subclass": lambda x: x.as_subclass(torch.nn.Parameter) * Strict(x),
}


@pytest.mark.parametrize("compute", _BESIDE_PLAIN_ONES.values(), ids=_BESIDE_PLAIN_ONES)
def test_another_class_takes_remote_tensors_for_plain_ones(sky: str, compute: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(4.0)
    got, want = compute(x.to(sky)), compute(x)
    assert isinstance(got, Strict)
    assert isinstance(want, Strict)
    assert got.device.type == "sky"
    assert torch.equal(got.inner.cpu(), want.inner)


def test_a_class_that_refuses_another_one_is_heard(sky: str) -> None:
    class Stranger(Strict):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

    x = torch.ones(2, device=sky)
    with pytest.raises(TypeError, match="Multiple dispatch failed"):
        torch.add(x, Stranger(x))
