"""Memory that is written and read at once is refused at the line, exactly where the CPU refuses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from skyproxy.tensor.core.metadata import plain_meta
from skyproxy.tensor.dispatch.op_info import info_of
from skyproxy.tensor.dispatch.overlaps import may_overlap

# Of x, a vector of six, and m, a matrix of three by three, each with a memory of its own; i are positions.
Operation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
REFUSED: dict[str, Operation] = {
    "the neighbours": lambda x, m, i: x[1:].add_(x[:-1]),
    "the neighbours, copied": lambda x, m, i: x[1:].copy_(x[:-1]),
    "the neighbours, put": lambda x, m, i: x.__setitem__(slice(1, None), x[:-1]),
    "the neighbours as a third": lambda x, m, i: x[1:].addcmul_(x[1:], x[:-1]),
    "the neighbours in a list": lambda x, m, i: torch._foreach_add_([m, x[1:]], [m, x[:-1]]),
    "the neighbours as a target": lambda x, m, i: torch.add(x[:-1], 1, out=x[1:]),
    "the neighbours, summed": lambda x, m, i: torch.cumsum(x[:-1], 0, out=x[1:]),
    "one of the elements": lambda x, m, i: x.mul_(x[0]),
    "the last element": lambda x, m, i: x.mul_(x[5]),
    "the first row": lambda x, m, i: m.add_(m[0]),
    "the transpose": lambda x, m, i: m.add_(m.t()),
    "the same bytes": lambda x, m, i: x.mul_(x.view(torch.int16)[:6]) if x.element_size() == 2 else m.add_(m.t()),
    "rows moved to rows": lambda x, m, i: m.index_copy_(0, i[:3], m),
    "rows added to rows": lambda x, m, i: m.index_add_(0, i[:3], m),
    "elements put in place of elements": lambda x, m, i: x.index_put_((i,), x),
    "elements scattered over themselves": lambda x, m, i: x.scatter_(0, i, x),
    "no elements scattered over themselves": lambda x, m, i: (lambda none: none.scatter_(0, i[:0], none))(x[:0]),
    "rows without elements added to themselves": lambda x, m, i: (lambda none: none.index_add_(0, i[:3], none))(
        m[:, :0]
    ),
    "what is gathered as the target": lambda x, m, i: torch.gather(x, 0, i, out=x),
    "parts joined in their place": lambda x, m, i: torch.cat([x[:2], x[2:]], out=x),
}
TAKEN: dict[str, Operation] = {
    "itself": lambda x, m, i: x.add_(x),
    "its view": lambda x, m, i: x.add_(x.view(6)),
    "its copy without a history": lambda x, m, i: x.mul_(x.detach()),
    "itself, copied": lambda x, m, i: x.copy_(x.view(-1)),
    "its other half": lambda x, m, i: x[:3].add_(x[3:]),
    "an element outside": lambda x, m, i: x[1:].mul_(x[0]),
    "the row before": lambda x, m, i: m[1].copy_(m[0]),
    "the column before, of which ATen cannot tell": lambda x, m, i: m[:, 1].copy_(m[:, 0]),
    "every second one": lambda x, m, i: x[::2].add_(x[1::2]),
    "shifted columns, of which ATen cannot tell": lambda x, m, i: m[:, 1:].copy_(m[:, :-1].clone()),
    "elements scattered over themselves, with gaps in between": lambda x, m, i: x[::2].scatter_(0, i[:3], x[::2]),
    "nothing": lambda x, m, i: x[:0].add_(x[:0]),
    "a matrix of itself": lambda x, m, i: torch.addmm(m, m, m).add_(m),
    "another row": lambda x, m, i: m.add_(x[:3]),
    "another element": lambda x, m, i: m.mul_(x[0]),
    "lists of the same": lambda x, m, i: torch._foreach_add_([x, m], [x, m]),
    "a list and an element elsewhere": lambda x, m, i: torch._foreach_mul_([m], x[1]),
    "a list and an element outside": lambda x, m, i: torch._foreach_mul_([m[1:], x], m[0][0]),
    "a list and a number": lambda x, m, i: torch._foreach_mul_([m, x], x.sum()),
    "other rows": lambda x, m, i: m.index_copy_(0, i[:2], m[:2].clone()),
    "a target apart": lambda x, m, i: torch.add(x[:3], 1, out=x[3:]),
    "by a mask of itself": lambda x, m, i: x.masked_fill_(x > 2, 1),
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64]


def _operands(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, m = torch.arange(1, 7).to(dtype), torch.arange(9).to(dtype).reshape(3, 3)
    return x.to(device), m.to(device), torch.arange(6, device=device)


def _call(operation: Operation, dtype: torch.dtype, device: str) -> tuple[str | None, list[torch.Tensor]]:
    operands = _operands(dtype, device)
    try:
        operation(*operands)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0], [t.cpu() for t in operands]
    if device != "cpu":
        torch.sky.synchronize()
    return None, [t.cpu() for t in operands]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*REFUSED, *TAKEN])
def test_overlapping_memory_is_refused_where_the_cpu_refuses_it(
    name: str, dtype: torch.dtype, sky: str, sky1: str
) -> None:
    operation = REFUSED.get(name) or TAKEN[name]
    expected = _call(operation, dtype, "cpu")
    if dtype is torch.float32:
        assert (expected[0] is not None) == (name in REFUSED)
    for device in (sky, sky, sky1):
        found = _call(operation, dtype, device)
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1], expected[1]))


def test_what_looks_alike_and_lies_apart_waits_for_nothing(sky: str) -> None:
    x, y, element, i = (torch.ones(n, device=sky) for n in (6, 6, (), 5))
    rows, matrix = torch.ones(5, device=sky), torch.ones(4, 5, device=sky)
    cache, new, at = torch.zeros(2, 8, 4, device=sky), torch.ones(2, 1, 4, device=sky), torch.tensor([3]).to(sky)
    torch.sky.synchronize()
    before = torch.sky.stats()["round_trips"]
    for _ in range(3):
        x[1:].add_(y[:-1]), x.mul_(element), matrix.add_(rows), torch._foreach_mul_([x, y], element)
        x[1:].copy_(y[:-1]), cache.index_copy_(1, at, new), torch._foreach_add_([x[1:]], [i])
        with pytest.raises(RuntimeError, match="single memory location"):
            x[1:].add_(x[:-1])
    assert torch.sky.stats()["round_trips"] == before + 3
    assert torch.equal(matrix.cpu(), torch.full((4, 5), 4.0))
    assert torch.equal(cache[:, 3].cpu(), torch.ones(2, 4))


def test_in_graphs_nothing_is_asked(sky: str) -> None:
    x, m = torch.ones(3, 3, device=sky), torch.ones(3, 3, device=sky)
    m.addmm_(m, x), torch.sky.synchronize()
    graph = torch.sky.Graph()
    with torch.sky.graph(graph):
        m.addmm_(m, x)
    graph.replay()
    assert m.sum().item() > 0


def test_looks_tell_most_operations_that_they_have_nothing_to_ask() -> None:
    add, put = info_of(torch.ops.aten.add_.Tensor), info_of(torch.ops.aten.index_add_.default)
    x, row = plain_meta((4, 5), torch.float32), plain_meta((5,), torch.float32)
    behind, columns = plain_meta((4, 5), torch.float32, (5, 1), 20), plain_meta((4, 5), torch.float32, (10, 2))
    nothing = plain_meta((0,), torch.float32, (1,), 2)
    assert not may_overlap(add, (x, x), {})
    assert not may_overlap(add, (x, nothing), {})
    assert not may_overlap(add, (x, behind), {})
    assert not may_overlap(add, (x, columns), {})
    assert may_overlap(add, (x, row), {})
    assert may_overlap(put, (x, 0, row, x), {})
