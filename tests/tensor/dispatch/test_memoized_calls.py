"""Functions whose operations are noted once: the same commands and values, and everything else as if they were run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import skyproxy
from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.dispatch.memoized_calls import MemoizedCall, _compile, memoized

OFTEN = 8
"""Calls after which a function that has a recipe is not run any more."""


class Counted:
    """A function, and how often it was really run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.runs = 0
        self._function = function
        self._calls = MemoizedCall()

    def by_recipe(self, *args: Any) -> Any:
        if torch.is_grad_enabled():
            return self(*args)
        return self._calls.call(lambda: self(*args), args, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self._function(*args, **kwargs)

    def settles(self, *args: Any) -> bool:
        """Whether it is run no more after some calls."""
        with torch.no_grad():
            for _ in range(OFTEN):
                self.by_recipe(*args)
            before = self.runs
            self.by_recipe(*args)
        return self.runs == before


def rotated(x: torch.Tensor, y: torch.Tensor, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[dim] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=dim)
    return x * y + turned * 0.5, (y.unsqueeze(0) + turned).sum(0)


@pytest.fixture
def pair(sky: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 8).to(sky), torch.randn(3, 8).to(sky)


def test_the_function_is_run_no_more_and_gives_the_same_bits(pair: tuple[torch.Tensor, ...], sky: str) -> None:
    counted = Counted(rotated)
    assert counted.settles(*pair)
    for _ in range(3):
        x, y = torch.randn(3, 8), torch.randn(3, 8)
        with torch.no_grad():
            before = torch.sky.stats()["ops"]
            found = counted.by_recipe(x.to(sky), y.to(sky))
            ops = torch.sky.stats()["ops"] - before
            assert [t.cpu().tolist() for t in found] == [t.tolist() for t in rotated(x, y)]
            before = torch.sky.stats()["ops"]
            rotated(*pair)
            assert torch.sky.stats()["ops"] - before == ops
        assert [(t.shape, t.stride(), t.dtype) for t in found] == [
            (t.shape, t.stride(), t.dtype) for t in rotated(x, y)
        ]


def test_other_shapes_dtypes_and_constants_have_recipes_of_their_own(pair: tuple[torch.Tensor, ...]) -> None:
    counted = Counted(lambda x, factor: x * factor)
    x = pair[0]
    assert counted.settles(x, 2)
    with torch.no_grad():
        for value, factor in ((x, 3), (x, 2.5), (x, True), (x[:2], 2), (x.double(), 2), (x.t(), 2)):
            found = counted.by_recipe(value, factor)
            assert torch.equal(found.cpu(), value.cpu() * factor)
            assert found.stride() == (value.cpu() * factor).stride()


def test_a_tensor_that_is_given_twice_is_no_recipe_for_two(pair: tuple[torch.Tensor, ...]) -> None:
    counted = Counted(lambda x, y: x - y)
    x, y = pair
    with torch.no_grad():
        for _ in range(OFTEN):
            assert counted.by_recipe(x, x).cpu().eq(0).all()
        for _ in range(OFTEN):
            assert torch.equal(counted.by_recipe(x, y).cpu(), x.cpu() - y.cpu())
            assert counted.by_recipe(x, x.detach()).cpu().eq(0).all()


def test_slots_come_back(pair: tuple[torch.Tensor, ...]) -> None:
    counted = Counted(rotated)
    assert counted.settles(*pair)
    recorder = DEVICES.at(0).recorder
    torch.sky.synchronize()
    before = recorder.live_slots
    with torch.no_grad():
        kept = [counted.by_recipe(*pair) for _ in range(5)]
        assert recorder.live_slots == before + 2 * len(kept)
        del kept
    assert recorder.live_slots == before
    assert len(set(recorder.free)) == len(recorder.free)


def scaled_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for factor in (2, 3, 5):
        x = (x * factor).exp() - factor  # its parts die one after the other, and their slots are used again
    return x, x.sum(0)


@pytest.mark.parametrize("step", [1, 8])
def test_what_is_large_is_released_at_the_same_places(sky: str, step: int) -> None:
    x = (torch.arange(1 << 16) * -1e-3).view(8, -1)[:, ::step]
    large = x.to(sky)
    assert large._sky.meta.large == (step == 1)
    counted = Counted(scaled_twice)
    assert counted.settles(large)
    recorder = DEVICES.at(0).recorder
    torch.sky.synchronize()
    before, allocated = recorder.live_slots, torch.sky.memory_allocated(sky)
    shapes = []

    def record() -> None:
        recorder.limit = 1 << 20  # all of it stays here, to be looked at
        for function in (scaled_twice, counted.by_recipe):
            start = recorder.unsent
            kept = function(large)
            assert recorder.live_slots == before + 2
            shapes.append([len(a) if isinstance(a, list) else type(a) for a in recorder.stream[start:]])
            assert all(torch.equal(a.cpu(), b) for a, b in zip(kept, scaled_twice(x.clone()), strict=True))
            del kept
            torch.sky.synchronize()
            recorder.limit = 1 << 20

    with torch.no_grad():
        assert recorder.between_batches(record, 10)
        assert shapes[0] == shapes[1]
        for _ in range(20):
            counted.by_recipe(large)
    torch.sky.synchronize()
    assert recorder.live_slots == before
    assert len(set(recorder.free)) == len(recorder.free)
    assert torch.sky.memory_allocated(sky) == allocated


def test_many_calls_beside_other_operations_are_right(pair: tuple[torch.Tensor, ...]) -> None:
    """Long enough for batches to be cut inside a call, and with neighbours whose slots come and go."""
    counted = Counted(rotated)
    x, y = pair
    a, b = x.cpu(), y.cpu()
    with torch.no_grad():
        for step in range(400):
            first, second = counted.by_recipe(x, y)
            expected, other = rotated(a, b)
            x, y = first * 0.5, second + step % 3
            a, b = expected * 0.5, other + step % 3
            x, y = torch.tanh(x), torch.tanh(y.expand(3, 8).clone())
            a, b = torch.tanh(a), torch.tanh(b.expand(3, 8).clone())
    assert counted.runs < 20
    torch.testing.assert_close(x.cpu(), a, rtol=0, atol=1e-5)
    torch.testing.assert_close(y.cpu(), b, rtol=0, atol=1e-5)


def test_two_threads_do_not_disturb_each_other(pair: tuple[torch.Tensor, ...]) -> None:
    counted = Counted(rotated)
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for step in range(60):
                x, y = torch.randn(3, 8, generator=generator), torch.randn(3, 8, generator=generator)
                found = counted.by_recipe(x.to("sky:0"), y.to("sky:0"))
                if any(not torch.equal(a.cpu(), b) for a, b in zip(found, rotated(x, y), strict=True)):
                    wrong.append(step)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def heads(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.softmax(x @ y.t(), -1)
    return (weights @ y).unsqueeze(1).transpose(0, 1), weights


def test_a_result_may_be_a_view_of_what_the_function_made(pair: tuple[torch.Tensor, ...], sky: str) -> None:
    counted = Counted(heads)
    assert counted.settles(*pair)
    recorder = DEVICES.at(0).recorder
    torch.sky.synchronize()
    before = recorder.live_slots
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad():
        view, weights = counted.by_recipe(x.to(sky), y.to(sky))
        expected, _ = heads(x, y)
        assert torch.equal(view.cpu(), expected)
        assert view.stride() == expected.stride()
        assert recorder.live_slots == before + 3  # and the product that it is a view of
        view.add_(weights[0, 0])
        row = view[0, 1]
        del view
        assert torch.equal(row.cpu(), expected[0, 1] + weights[0, 0].cpu())
    del row, weights
    assert recorder.live_slots == before


def test_shapes_share_the_source_of_their_recipes(sky: str) -> None:
    counted = Counted(lambda x, y: torch.cat((x * 2, y), -2).transpose(0, 1).reshape(-1))
    before = _compile.cache_info().misses
    with torch.no_grad():
        for rows in range(2, 12):
            x, y = torch.randn(rows, 3), torch.randn(rows + 1, 3)
            for _ in range(3):
                found = counted.by_recipe(x.to(sky), y.to(sky))
                assert torch.equal(found.cpu(), torch.cat((x * 2, y)).t().reshape(-1))
    assert _compile.cache_info().misses == before + 1


def test_a_function_that_reads_a_value_is_run_also_where_the_value_is_known(sky: str) -> None:
    counted = Counted(lambda x, n: x * 2 if n[0].item() > 3 else x * 3)
    x = torch.ones(3).to(sky)
    with torch.no_grad():
        for number in range(2 * OFTEN):
            n = torch.tensor([number]).to(sky)
            assert counted.by_recipe(x, n).tolist() == [2.0 if number > 3 else 3.0] * 3
    assert counted.runs == 2 * OFTEN


def test_where_gradients_are_wanted_it_is_run(pair: tuple[torch.Tensor, ...]) -> None:
    counted = Counted(rotated)
    assert counted.settles(*pair)
    x, runs = pair[0].clone().requires_grad_(), counted.runs
    counted.by_recipe(x, pair[1])[0].sum().backward()
    assert counted.runs == runs + 1
    assert x.grad is not None


def test_where_somebody_looks_at_the_operations_it_is_run(pair: tuple[torch.Tensor, ...], sky: str) -> None:
    counted = Counted(rotated)
    assert counted.settles(*pair)
    with torch.no_grad():
        runs = counted.runs
        with FlopCounterMode(display=False):
            counted.by_recipe(*pair)
        with torch.autocast("sky", dtype=torch.bfloat16):
            counted.by_recipe(*pair)
        torch.vmap(counted.by_recipe)(torch.randn(2, 3, 8).to(sky), torch.randn(2, 3, 8).to(sky))
        assert counted.runs == runs + 3


def test_inference_tensors_are_such(pair: tuple[torch.Tensor, ...]) -> None:
    counted = Counted(rotated)
    assert counted.settles(*pair)
    with torch.inference_mode():
        assert all(counted.by_recipe(*pair)[0].is_inference() for _ in range(OFTEN))
    with torch.no_grad():
        assert not counted.by_recipe(*pair)[0].is_inference()


def test_what_is_captured_in_a_graph_is_run(pair: tuple[torch.Tensor, ...]) -> None:
    counted = Counted(rotated)
    assert counted.settles(*pair)
    runs = counted.runs
    graph = torch.sky.SkyGraph()
    with torch.no_grad():
        with torch.sky.graph(graph):
            first, _ = counted.by_recipe(*pair)
        graph.replay()
    assert counted.runs == runs + 1
    assert torch.equal(first.cpu(), rotated(*(t.cpu() for t in pair))[0])


def hidden(x: torch.Tensor) -> torch.Tensor:
    return x + HIDDEN[0]


HIDDEN: list[torch.Tensor] = []


@pytest.mark.parametrize(
    "function",
    [
        hidden,
        lambda x: x.add_(1),
        lambda x: x,
        lambda x: x[1:],
        lambda x: x.detach(),
        lambda x: x * x.sum().item(),
        lambda x: x + torch.tensor(1.0),
        lambda x: [x + 1],
        lambda x: x[x > 0],
    ],
    ids=["reads another tensor", "in place", "argument", "view", "detached", "value", "host", "list", "dynamic"],
)
def test_what_is_no_plain_function_of_tensors_is_run_every_time(function: Any, sky: str) -> None:
    HIDDEN[:] = [torch.ones(4).to(sky)]
    counted = Counted(function)
    x, y = torch.arange(1.0, 5.0).to(sky), torch.arange(1.0, 5.0)
    with torch.no_grad():
        for number in range(2 * OFTEN):
            HIDDEN[0] = torch.full((4,), float(number)).to(sky)
            expected = y + number if function is hidden else function(y)
            found = counted.by_recipe(x)
            found, expected = (found[0], expected[0]) if isinstance(found, list) else (found, expected)
            assert torch.equal(found.cpu(), expected)
    assert counted.runs == 2 * OFTEN


def test_random_numbers_are_drawn_anew(sky: str) -> None:
    counted = Counted(lambda x: x + torch.rand_like(x))
    x = torch.zeros(4).to(sky)
    with torch.no_grad():
        torch.manual_seed(0)
        found = [counted.by_recipe(x).tolist() for _ in range(OFTEN)]
        torch.manual_seed(0)
        assert found == [torch.rand_like(x).tolist() for _ in range(OFTEN)]
    assert len({tuple(row) for row in found}) == OFTEN


def test_an_interrupted_call_leaves_nothing_behind(sky: str) -> None:
    interrupts = [False]

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if interrupts[0]:
            raise KeyboardInterrupt
        return y + 1

    counted = Counted(function)
    x = torch.ones(3).to(sky)
    with torch.no_grad():
        interrupts[0] = True
        with pytest.raises(KeyboardInterrupt):
            counted.by_recipe(x)  # the call that would have been noted
    interrupts[0] = False
    assert counted.settles(x)
    with torch.no_grad():
        assert counted.by_recipe(x).tolist() == [3.0, 3.0, 3.0]


def test_an_error_names_the_line_of_the_function(sky: str) -> None:
    counted = Counted(lambda x, places: torch.relu(x.index_select(0, places)) + 1)
    x, good, bad = torch.randn(4).to(sky), torch.tensor([1, 2]).to(sky), torch.tensor([1, 9]).to(sky)
    assert counted.settles(x, good)
    with torch.no_grad(), pytest.raises(skyproxy.errors.RemoteError, match=r"test_memoized_calls\.py"):
        counted.by_recipe(x, bad).cpu()
    with torch.no_grad():
        assert torch.equal(counted.by_recipe(x, good).cpu(), torch.relu(x.cpu()[1:3]) + 1)


class Scale(torch.nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.unused = object()
        self.weight = torch.nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(x) + self.shift

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


recorded = memoized(Scale.forward, __name__.partition(".")[0], takes_module=True)


def is_noted(call: Callable[[], object]) -> bool:
    """Whether a call asks PyTorch for no multiplication."""
    seen: list[object] = []
    plain = vars(RemoteTensor)["__torch_dispatch__"].__func__

    def watched(cls: type, func: Any, *args: Any) -> Any:
        seen.append(func)
        return plain(cls, func, *args)

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(RemoteTensor, "__torch_dispatch__", classmethod(watched))
        call()
    return torch.ops.aten.mul.Tensor not in seen


def test_a_module_follows_its_parameters_and_attributes(sky: str) -> None:
    module, twin = Scale(1e-6).to(sky), Scale(1e-6)
    x = torch.randn(2, 8)

    def check() -> None:
        with torch.no_grad():
            for _ in range(OFTEN):
                assert torch.equal(recorded(module, x.to(sky)).cpu(), twin.forward(x))

    check()
    assert is_noted(lambda: recorded(module, x.to(sky)))
    for change in (
        lambda m: setattr(m, "eps", 0.5),
        lambda m: setattr(m, "weight", torch.nn.Parameter(torch.full((8,), 3.0, device=m.shift.device))),
        lambda m: m.shift.data.fill_(-1.0),
        lambda m: m.double(),
    ):
        change(module)
        change(twin)
        x = x.to(twin.weight.dtype)
        check()


class Doubled(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = recorded(self, x)
        return found * 2


def test_a_class_that_calls_the_method_has_constants_of_its_own(sky: str) -> None:
    first, second = Doubled(1e-6), Doubled(0.5)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(OFTEN):
            for module in (first, second):
                expected = module.to("cpu")(x)
                assert torch.equal(module.to(sky)(x.to(sky)).cpu(), expected)


def test_what_a_program_replaces_meanwhile_is_used(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Scale(1e-6).to(sky), torch.randn(2, 8).to(sky)
    with torch.no_grad():
        for _ in range(OFTEN):
            plain = recorded(module, x)
        assert is_noted(lambda: recorded(module, x))
        rsqrt, power = torch.rsqrt, torch.Tensor.pow
        for owner, name, new in (
            (torch, "rsqrt", lambda v: rsqrt(v) * 3),
            (torch.Tensor, "pow", lambda v, n: power(v, n) * 4),
            (Scale, "_scaled", lambda self, v: v),
            (module, "_scaled", lambda v: v),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, new)
                assert torch.equal(recorded(module, x), Scale.forward(module, x))
                assert not torch.equal(recorded(module, x), plain)
        assert torch.equal(recorded(module, x), plain)


def test_what_skyproxy_itself_replaces_later_takes_no_notes_away(sky: str) -> None:
    module, x = Scale(1e-6).to(sky), torch.randn(2, 8).to(sky)
    code = (lambda v, n: power(v, n)).__code__  # type: ignore[name-defined]  # noqa: F821
    ours = FunctionType(code, {"__name__": "skyproxy.tests", "power": torch.Tensor.pow})
    patch = patching.replace(torch.Tensor, "pow", ours, why="a test", test=__name__)
    try:
        assert [is_noted(lambda: recorded(module, x)) for _ in range(OFTEN)][-1]
    finally:
        patching.undo(patch)


def test_tangents_are_not_lost(sky: str) -> None:
    module, x = Scale(1e-6).to(sky), torch.randn(2, 8).to(sky)
    with torch.no_grad():
        for _ in range(OFTEN):
            recorded(module, x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            found, expected = (forward_ad.unpack_dual(f(module, dual)).tangent for f in (recorded, Scale.forward))
    assert torch.equal(found, expected)


def test_each_zero_has_a_recipe_of_its_own(sky: str) -> None:
    counted = Counted(lambda x, zero: x * zero)
    x = torch.ones(2).to(sky)
    with torch.no_grad():
        for zero in (0.0, -0.0):
            for _ in range(OFTEN):
                assert torch.equal(counted.by_recipe(x, zero).cpu().signbit(), (torch.ones(2) * zero).signbit())


def test_two_modules_share_a_recipe_and_not_their_weights(sky: str) -> None:
    first, second = Scale(1e-6).to(sky), Scale(1e-6).to(sky)
    x = torch.randn(2, 8).to(sky)
    with torch.no_grad():
        second.weight.fill_(5.0)
        for _ in range(OFTEN):
            a, b = recorded(first, x) - 1, recorded(second, x) - 1
            torch.testing.assert_close(b.cpu(), a.cpu() * 2.5)
