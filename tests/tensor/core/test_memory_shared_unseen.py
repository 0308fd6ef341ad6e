"""Two tensors may share memory though neither is a view of the other here: what is written to one is read of both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from tests.integration.programs import succeed, wait_for

Pair = tuple[torch.Tensor, torch.Tensor]


def _numbers(sky: str) -> torch.Tensor:
    return torch.arange(6.0, device=sky) * 1


def _on_worker(function: Callable[..., Any], *args: object) -> Any:
    return next(node for node in skyproxy.list_nodes() if node.alive).run(function, *args)


def _given_twice(sky: str) -> Pair:
    def give(name: str, x: torch.Tensor) -> torch.Tensor:
        import builtins

        return builtins.__dict__.setdefault(name, x * 1)

    x, name = _numbers(sky), f"_skyproxy_given_{torch.randint(1 << 40, ()).item()}"
    return _on_worker(give, name, x), _on_worker(give, name, x)


def _kept_and_given(sky: str) -> Pair:
    def keep(name: str, x: torch.Tensor) -> None:
        import builtins

        builtins.__dict__[name] = x

    def give(name: str) -> torch.Tensor:
        import builtins

        return builtins.__dict__[name]

    x, name = _numbers(sky), f"_skyproxy_kept_{torch.randint(1 << 40, ()).item()}"
    _on_worker(keep, name, x)
    return x, _on_worker(give, name)


def _of_nested(sky: str) -> Pair:
    nested = torch.nested.nested_tensor([torch.arange(6.0), torch.arange(2.0)]).to(sky)
    return nested.unbind()[0], nested.unbind()[0]


def _of_coo(sky: str) -> Pair:
    sparse = torch.sparse_coo_tensor(torch.arange(6, device=sky)[None], _numbers(sky), (6,), check_invariants=False)
    return sparse._values(), sparse._values()


def _of_transposed_coo(sky: str) -> Pair:
    sparse = torch.sparse_coo_tensor(torch.arange(6, device=sky).repeat(2, 1), _numbers(sky), (6, 6)).coalesce()
    sparse = sparse.detach()
    return sparse.values(), sparse.detach()._values()


def _of_layout(sky: str, layout: torch.layout, get: str) -> Pair:
    dense = torch.full((3, 2), 8.0)
    dense.view(-1).copy_(torch.arange(1.0, 7.0))
    options = {"blocksize": (1, 1)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    sparse = dense.to(sky).to_sparse(layout=layout, **options)
    values = getattr(sparse, get)()
    values.copy_(torch.arange(values.numel(), device=sky).view(values.shape))
    return getattr(sparse, get)(), getattr(sparse, get)()


def _in_a_graph(sky: str, number: int) -> Pair:
    x, graph = _numbers(sky), torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        y = x * 1
        z = y.view(2, 3)
        outside = x.view(3, 2)
    graph.replay()
    return [(y, z), (z, y), (x, outside), (outside, x)][number]


PAIRS: dict[str, Callable[[str], Pair]] = {
    "given twice by a function": _given_twice,
    "kept by a function": _kept_and_given,
    "kept by a function, seen from there": lambda sky: _kept_and_given(sky)[::-1],
    "parts of a nested tensor": _of_nested,
    "values of COO": _of_coo,
    "values of COO, detached": _of_transposed_coo,
    **{
        f"{get} of {layout}": lambda sky, layout=layout, get=get: _of_layout(sky, layout, get)  # type: ignore[misc]
        for layout, gets in {
            torch.sparse_coo: ["values", "indices"],
            torch.sparse_csr: ["values", "col_indices", "crow_indices"],
            torch.sparse_csc: ["values", "row_indices", "ccol_indices"],
            torch.sparse_bsr: ["values", "col_indices", "crow_indices"],
            torch.sparse_bsc: ["values", "row_indices", "ccol_indices"],
        }.items()
        for get in gets
    },
    **{f"in a graph, {number}": lambda sky, number=number: _in_a_graph(sky, number) for number in range(4)},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_written_to_one_is_read_of_both(name: str, sky: str) -> None:
    read, written = PAIRS[name](sky)
    flat = read.flatten()
    before = [read.flatten()[i].item() for i in range(3)]
    assert before == [0, 1, 2]
    assert flat[1].item() == 1
    assert len(read.nonzero()) == read.numel() - 1
    assert read.cpu().flatten()[1] == 1
    with torch.no_grad():
        written.fill_(7)
    assert [read.flatten()[i].item() for i in range(3)] == [7, 7, 7]
    assert len(read.nonzero()) == read.numel()
    assert (read.cpu() == 7).all()
    assert (read + 0 == 7).all()


def test_what_a_function_writes_after_its_end_is_noticed(sky: str) -> None:
    def write_later(x: torch.Tensor, path: str) -> None:
        import os
        import threading
        import time

        def write() -> None:
            while not os.path.exists(path):
                time.sleep(0.01)
            x.fill_(7)
            os.remove(path)

        threading.Thread(target=write, daemon=True).start()

    x = _numbers(sky)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "now"
        _on_worker(write_later, x, str(path))
        assert [x[i].item() for i in range(3)] == [0, 1, 2]
        path.touch()
        wait_for(lambda: not path.exists(), "the thread has written")
    assert (x[1].item(), len(x.nonzero()), x.cpu().tolist()) == (7, 6, [7.0] * 6)


def test_a_graph_of_a_module_s_globals_ends_with_the_program_without_a_word() -> None:
    source = """
import torch, skyproxy
x = torch.zeros(3, device="sky:0")
graph = torch.sky.SkyGraph()
with torch.sky.graph(graph):
    y = x + 1
graph.replay()
print(y.tolist())
"""
    assert succeed(source) == "[1.0, 1.0, 1.0]"
