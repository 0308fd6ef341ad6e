"""Numbers of small storages whose bytes are known here cost no wait, and whatever writes to one is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.tensor.core import host_copies


def trips() -> int:
    return int(torch.sky.stats()["round_trips"])


def waits(ask: Callable[[], Any], expected: object, most: int = 0) -> None:
    """Hold that `ask` gives this, and waits no more than so often."""
    before = trips()
    found = ask()
    assert found == expected
    assert trips() - before <= most


VIEWS: dict[str, Callable[[torch.Tensor], list[int]]] = {
    "elements": lambda x: [int(x[i]) for i in range(6)],
    "a loop": lambda x: [int(t) for t in x],
    "unbind": lambda x: [t.item() for t in x.unbind()],
    "slices": lambda x: [int(t) for t in x[2:]] + [int(t) for t in x[::2]],
    "rows": lambda x: [int(x.reshape(2, 3)[1][2]), int(x.view(3, 2).t()[1, 0])],
    "the last": lambda x: [int(x[-1]), int(x.unsqueeze(0)[0, 1])],
    "detached": lambda x: [int(x.detach()[3]), int(x.data[4])],
    "parts": lambda x: [int(part[0]) for part in x.split(2)] + [int(part[1]) for part in x.chunk(3)],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.float16])
def test_elements_of_what_was_uploaded_need_no_wait(name: str, dtype: torch.dtype, sky: str) -> None:
    values = torch.tensor([5, 3, 1, 0, 7, 100], dtype=dtype)
    there = values.to(sky)
    waits(lambda: VIEWS[name](there), VIEWS[name](values))


@pytest.mark.parametrize("name", VIEWS)
def test_elements_of_what_was_computed_cost_one_wait_together(name: str, sky: str) -> None:
    values = torch.tensor([5, 3, 1, 0, 7, 6])
    there = values.to(sky) * 2
    waits(lambda: VIEWS[name](there), VIEWS[name](values * 2), most=1)


def test_numbers_are_those_that_the_worker_would_send(sky: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        values = torch.tensor([0.1, -0.0, float("inf"), float("-inf"), 1e-40, 3.0e38, 65504.0]).to(dtype)
        there = values.to(sky)
        for ours, theirs in zip(there, values, strict=True):
            assert repr(ours.item()) == repr(theirs.item())
        assert torch.tensor([float("nan")], dtype=dtype).to(sky)[0].item() != 0
    assert [bool(b) for b in torch.tensor([True, False]).to(sky)] == [True, False]


def test_what_is_computed_of_elements_is_known(sky: str) -> None:
    steps = torch.arange(980, -1, -20).to(sky)
    before = trips()
    for number, t in enumerate(steps):
        t.expand(3)  # a model takes it first
        previous = t - 20
        assert bool(previous >= 0) == (number < 49)
        assert int(previous) == 960 - 20 * number
    assert trips() == before


def test_where_a_number_stands_in_a_tensor_is_known(sky: str) -> None:
    steps = torch.arange(980, -1, -20)
    there = steps.to(sky)
    before = trips()
    for t, twin in zip(there, steps, strict=True):
        index = (there == t).nonzero(as_tuple=True)[0][0]
        expected = (steps == twin).nonzero(as_tuple=True)[0][0]
        assert index.item() == expected.item()
        if index < 49:
            assert int(there[index + 1]) == int(steps[expected + 1])
        found = (t <= there).nonzero()
        assert found.shape == (twin <= steps).nonzero().shape
    assert trips() == before
    assert torch.equal(found.cpu(), (twin <= steps).nonzero())
    there[3] = 7
    assert (there == there[4]).nonzero().tolist() == [[4]]
    assert there.nonzero().shape == (49, 1)


def test_large_tensors_are_not_kept(sky: str) -> None:
    there = torch.arange(5000).to(sky)
    assert int(there[7]) == 7
    assert int((there * 2)[7]) == 14
    assert not there._sky.copied or not there._sky.copy.values  # type: ignore[attr-defined]


def test_no_more_copies_live_than_are_allowed(sky: str) -> None:
    tensors = [torch.arange(number, number + 3).to(sky) for number in range(200)]
    assert sum(t._sky.copied and t._sky.copy.values is not None for t in tensors) <= 64  # type: ignore[attr-defined]
    assert [int(t[1]) for t in tensors] == list(range(1, 201))
    assert sum(t._sky.copied and t._sky.copy.values is not None for t in tensors) <= 128  # type: ignore[attr-defined]
    assert len(host_copies._asked) <= 64


# --- what writes -----------------------------------------------------------------------------------------------------


def _run_there(x: torch.Tensor) -> None:
    next(node for node in skyproxy.list_nodes() if node.alive).run(_fill, x)


def _fill(x: torch.Tensor) -> None:
    x.fill_(7)


def _replay(x: torch.Tensor) -> None:
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        x.fill_(7)
    graph.replay()


def _by_a_storage(x: torch.Tensor) -> None:
    x.untyped_storage().copy_(torch.full((6,), 7.0).untyped_storage())


def _by_a_part_of_a_storage(x: torch.Tensor) -> None:
    part = x.untyped_storage()[0:12]
    x[0].item()
    part.copy_(torch.full((3,), 7.0).untyped_storage())


def _by_a_long_list(x: torch.Tensor) -> None:
    others = [torch.zeros((), device=x.device) for _ in range(12)]
    torch._foreach_copy_([*others, *x.unbind()], [torch.full((), 7.0, device=x.device)] * 18)


def _by_a_sparse_tensor(x: torch.Tensor) -> None:
    indices = torch.arange(6, device=x.device)[None]
    sparse = torch.sparse_coo_tensor(indices, x, (6,), check_invariants=False)
    x[0].item()
    sparse._values().fill_(7)


def _by_statistics(x: torch.Tensor) -> None:
    ones = torch.ones(6, device=x.device)
    torch.native_batch_norm(torch.full((4, 6), 7.0, device=x.device), ones, ones, x, ones.clone(), True, 1.0, 1e-5)


def _by_a_module(x: torch.Tensor) -> None:
    norm = nn.BatchNorm1d(6, momentum=1.0, device=x.device)
    norm._buffers["running_mean"] = x
    norm(torch.full((4, 6), 7.0, device=x.device))


def _by_an_optimizer(x: torch.Tensor, **options: Any) -> None:
    parameters = [nn.Parameter(x), *(nn.Parameter(torch.ones(2, device=x.device)) for _ in range(3))]
    for p in parameters:
        p.grad = 7 - p.detach()
    torch.optim.SGD(parameters, lr=1.0, maximize=True, **options).step()


def _by_a_gradient(x: torch.Tensor) -> None:
    leaf = torch.ones(6, device=x.device, requires_grad=True)
    leaf.grad = x
    x[0].item()
    (leaf * (7 - x.detach().clone())).sum().backward()


def _resized(x: torch.Tensor) -> None:
    other = torch.empty(0, device=x.device).set_(x.untyped_storage(), 0, (6,))
    other.resize_(6, 1)
    other.fill_(7)


def _taken_over(x: torch.Tensor) -> None:
    x.set_(torch.full((6,), 7.0, device=x.device))


def _in_threads(x: torch.Tensor) -> None:
    import threading

    threads = [threading.Thread(target=x[i].fill_, args=(7,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "fill_": lambda x: x.fill_(7),
    "an element": lambda x: [x[i].fill_(7) for i in range(6)],
    "elements of a loop": lambda x: [t.fill_(7) for t in x],
    "elements that are read": lambda x: [(t.item(), t.mul_(0), t.item(), t.add_(7)) for t in x],
    "setitem": lambda x: x.__setitem__(slice(None), 7.0),
    "a view of a view": lambda x: x.view(2, 3).t().fill_(7),
    "data": lambda x: x.data.fill_(7),
    "new data": lambda x: setattr(x, "data", torch.full((6,), 7.0, device=x.device)),
    "out=": lambda x: torch.add(torch.full((6,), 3.0, device=x.device), 4.0, out=x),
    "out= of views": lambda x: [torch.add(part, 7 - part, out=part) for part in x.split(2)],
    "copy_ from the CPU": lambda x: x.copy_(torch.full((6,), 7.0)),
    "index_put_": lambda x: x.index_put_((torch.arange(6, device=x.device),), torch.tensor(7.0, device=x.device)),
    "masked_fill_": lambda x: x.masked_fill_(x > -1, 7.0),
    "scatter_": lambda x: x.scatter_(0, torch.arange(6, device=x.device), 7.0),
    "a short list": lambda x: torch._foreach_copy_([x], [torch.full((6,), 7.0, device=x.device)]),
    "a list of views": lambda x: torch._foreach_copy_([*x], [torch.full((), 7.0, device=x.device)] * 6),
    "a long list": _by_a_long_list,
    "an optimizer of lists": lambda x: _by_an_optimizer(x, foreach=True),
    "a fused optimizer": lambda x: _by_an_optimizer(x, fused=True),
    "an optimizer": lambda x: _by_an_optimizer(x, foreach=False),
    "a gradient": _by_a_gradient,
    "statistics": _by_statistics,
    "a module's statistics": _by_a_module,
    "a storage": _by_a_storage,
    "a part of a storage": _by_a_part_of_a_storage,
    "a tensor on its storage": _resized,
    "set_": _taken_over,
    "a sparse tensor": _by_a_sparse_tensor,
    "a function": _run_there,
    "a graph": _replay,
    "vmap": lambda x: torch.vmap(lambda y: y.mul_(0).add_(7))(x),
    "threads": _in_threads,
    "random numbers": lambda x: x.uniform_(7, 7),
    "inference": lambda x: torch.inference_mode()(lambda: x.fill_(7))(),
}  # fmt: skip
SOURCES: dict[str, Callable[[str], torch.Tensor]] = {
    "uploaded": lambda sky: torch.arange(6.0).to(sky),
    "computed": lambda sky: torch.arange(6.0, device=sky) * 1,
    "a view": lambda sky: torch.arange(6.0).to(sky).view(3, 2).flatten(),
}


def made(source: str, write: str, sky: str) -> torch.Tensor:
    """Make the numbers from 0 to 5 on the device, in a storage that this write can change."""
    x = SOURCES[source](sky)
    return x.clone() if write == "a part of a storage" else x


def write_to(x: torch.Tensor, write: str) -> None:
    """Fill x with 7, in one of the ways above."""
    with torch.no_grad() if write != "a gradient" else torch.enable_grad():
        WRITES[write](x)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("write", WRITES)
def test_what_writes_to_a_storage_is_noticed(write: str, source: str, sky: str) -> None:
    x = made(source, write, sky)
    before = list(x)
    assert [t.item() for t in x] == [0, 1, 2, 3, 4, 5]
    assert [t.item() for t in before] == [0, 1, 2, 3, 4, 5]
    write_to(x, write)
    kept = 3 if write == "a part of a storage" else 6
    assert [x[i].item() for i in range(kept)] == [7] * kept
    assert [t.item() for t in x][:kept] == [7] * kept
    if write not in ("new data", "set_"):
        assert [t.item() for t in before][:kept] == [7] * kept
    assert x.cpu()[:kept].tolist() == [7] * kept


def test_what_a_function_writes_while_it_runs_is_noticed(sky: str) -> None:
    x = torch.arange(6.0).to(sky)
    total = torch.tensor(3.0).to(sky)

    def fill_late(x: torch.Tensor, total: torch.Tensor) -> None:
        import time

        time.sleep(0.3)
        x.fill_(7)
        total.fill_(7)

    call = next(node for node in skyproxy.list_nodes() if node.alive).submit(fill_late, x, total)
    x[0].item(), total.item()
    call.result()
    assert (x[0].item(), x[5].item(), total.item()) == (7, 7, 7)


# --- programs --------------------------------------------------------------------------------------------------------


def _on_its_storage(x: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty(0, dtype=x.dtype, device=x.device)
    return fresh.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())  # type: ignore[arg-type]


def _add_in_a_long_list(x: torch.Tensor, number: int) -> None:
    torch._foreach_add_([*(torch.zeros(2, dtype=x.dtype, device=x.device) for _ in range(10)), x], number)


def _alias(draw: random.Random, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Choose a view of a tensor that looks like x."""
    choices: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.unsqueeze(0),
        lambda t: t.view_as(t),
        _on_its_storage,
        lambda t: t.as_strided((2,), (1,), t.storage_offset()) if t.numel() > 2 and t.is_contiguous() else t.detach(),
    ]  # fmt: skip
    if x.dim():
        dim, size = draw.randrange(x.dim()), x.shape
        at = draw.randrange(size[dim]) if size[dim] else 0
        if size[dim]:
            choices += [
                lambda t: t.select(dim, at),
                lambda t: t.narrow(dim, at, size[dim] - at),
                lambda t: t.unbind(dim)[at],
                lambda t: t.split(1, dim)[at],
                lambda t: t[tuple([slice(None)] * dim + [slice(None, None, 2)])],
            ]
        choices += [lambda t: t.transpose(0, dim), lambda t: t.squeeze(), lambda t: t.flatten()]
        if x.dim() > 1:
            choices.append(lambda t: t.diagonal())
        if x.is_contiguous():
            choices.append(lambda t: t.view(-1))
            if x.dtype is torch.float32:
                choices.append(lambda t: t.view(torch.int32).view(torch.float32))
    return draw.choice(choices)


def _write(draw: random.Random, x: torch.Tensor) -> Callable[[torch.Tensor], object]:
    number = draw.randrange(1, 5)
    choices: list[Callable[[torch.Tensor], object]] = [
        lambda t: t.fill_(number),
        lambda t: t.add_(number).clamp_(0, 50),
        lambda t: t.mul_(2).clamp_(0, 50),
        lambda t: t.copy_(torch.full(t.shape, number)),
        lambda t: t.copy_(torch.full(t.shape, number, device=t.device)),
        lambda t: t.masked_fill_(t > number, number),
        lambda t: t.__setitem__(..., number),
        lambda t: torch.add(t.clone(), number, out=t),
        lambda t: torch._foreach_add_([t], number),
        lambda t: _add_in_a_long_list(t, number),
        lambda t: (t.untyped_storage().copy_(t.untyped_storage().clone()), t.copy_(t % 7 + number)),
        lambda t: torch.inference_mode()(lambda: t.zero_())(),
        lambda t: t.untyped_storage().fill_(0),
    ]  # fmt: skip
    if x.dim() == 1 and len(x):
        at = draw.randrange(len(x))
        choices += [
            lambda t: t.index_fill_(0, torch.tensor([at], device=t.device), number),
            lambda t: t.__setitem__(at, number),
            lambda t: torch._foreach_add_([*t], number),
        ]
    return draw.choice(choices)


def _program(seed: int, sky: str, length: int) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.int64, torch.float32, torch.uint8, torch.int32])
    shape = draw.choice([(6,), (3, 4), (2, 3, 2), (1,), ()])
    base = torch.arange(max(1, int(torch.tensor(shape).prod())), dtype=dtype).reshape(shape)
    start = draw.randrange(3)
    pairs = [(base.to(sky) if start else base.to(sky) * 1, base)]
    for _ in range(length):
        ours, theirs = draw.choice(pairs)
        kind = draw.random()
        if kind < 0.3:
            view = _alias(draw, theirs)
            pairs.append((view(ours), view(theirs)))
            if len(pairs) > 12:
                pairs.pop(draw.randrange(len(pairs)))
        elif kind < 0.5:
            write = _write(draw, theirs)
            write(ours)
            write(theirs)
        elif theirs.numel():
            at = tuple(draw.randrange(size) for size in theirs.shape)
            mine, other = ours[at], theirs[at]
            if draw.random() < 0.3:
                mine, other = mine + 1, other + 1
            assert mine.item() == other.item(), (seed, at)
        if draw.random() < 0.03:
            pairs = [draw.choice(pairs)]
    for ours, theirs in pairs:
        assert torch.equal(ours.cpu(), theirs), seed


LONG = 9_000


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float32, torch.float64], ids=str
)
def test_numbers_of_a_large_tensor_that_are_read_in_turn_are_read_ahead(dtype: torch.dtype, sky: str) -> None:
    values = torch.arange(1, LONG + 1).fmod_(97).to(dtype)
    there = values.to(sky) + (dtype is not torch.bool)
    expected = values + (dtype is not torch.bool)
    waits(lambda: [t.item() for t in there[:3000]], expected[:3000].tolist(), most=12)
    waits(lambda: [there[i].item() for i in range(3000, 3200)], expected[3000:3200].tolist(), most=12)
    pairs = there.view(-1, 2)
    waits(lambda: [t.item() for t in pairs[:500, 1]], expected[1:1000:2].tolist(), most=12)
    waits(lambda: [t.item() for t in there[-3:]], expected[-3:].tolist(), most=12)


def test_all_and_any_of_a_mask_ask_seldom(sky: str) -> None:
    mask = torch.ones(LONG, dtype=torch.bool)
    mask[-1] = False
    there = ~(~mask).to(sky)
    waits(lambda: all(there), False, most=16)
    waits(lambda: any(~there), True, most=16)


@pytest.mark.parametrize("how", ["an element", "another view", "a fill", "a graph"])
def test_what_was_read_ahead_is_forgotten_when_something_writes(how: str, sky: str) -> None:
    here = torch.arange(LONG)
    there = here.to(sky) * 1
    graph = torch.sky.SkyGraph()  # type: ignore[attr-defined]
    if how == "a graph":
        with torch.sky.graph(graph):  # type: ignore[attr-defined]
            there.add_(1)
    ours, theirs = there[:400].unbind(), here[:400].unbind()
    for i in range(300):
        assert ours[i].item() == theirs[i].item(), i
        if i % 60 == 59:
            if how == "a graph":
                graph.replay()
                here.add_(1)
                continue
            for x in (there, here):
                if how == "an element":
                    x[i + 1] = -i
                elif how == "another view":
                    x.view(100, -1)[:, ::2].mul_(-3)
                else:
                    x.fill_(i)


@pytest.mark.parametrize("seed", range(12))
def test_programs_of_views_writes_and_reads_give_the_numbers_of_the_cpu(seed: int, sky: str) -> None:
    _program(seed, sky, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_longer_programs(seed: int, sky: str) -> None:
    for part in range(20):
        _program(seed * 1000 + part, sky, 300)
