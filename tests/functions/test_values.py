"""What goes into a function and comes out of it: plain values, tensors by reference, modules, classes of one's own."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, RemoteError
from skyproxy.functions import Payload


@dataclasses.dataclass
class Measured:
    """A class that the worker cannot import."""

    name: str
    weights: torch.Tensor


class Doubling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.tied = self.inner
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("hidden", torch.tensor(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def handles(node: skyproxy.Node) -> int:
    """Values that the worker holds for us, once everything released has arrived."""
    gc.collect()
    node.synchronize()
    held: int = node._session.call("stats")["handles"]
    return held


def test_it_runs_elsewhere(node: skyproxy.Node) -> None:
    assert node.run(os.getpid) == node.process_id != os.getpid()


def test_nested_functions_lambdas_and_defaults(node: skyproxy.Node) -> None:
    factor = 3

    def inner(x: int, *rest: int, plus: int = 1) -> int:
        return x * factor + sum(rest) + plus

    assert node.run(inner, 2, 10, 20) == 37
    assert node.run(lambda x: x + factor, 1) == 4


def test_the_usual_short_name_beside_torch_is_no_submodule_of_torch(node: skyproxy.Node) -> None:
    source = "def function():\n    return torch.ones(2).sum().item(), sky.instance_info().world_size\n"
    names = {"torch": torch, "sky": skyproxy, "__name__": "__main__"}
    exec(source, names)
    assert node.run(names["function"]) == (2.0, 1)


def test_values_of_all_kinds_return_equal(node: skyproxy.Node) -> None:
    value = {"a": [1, 2.5, None], "b": (True, b"x"), "c": {1, 2}, "d": collections.Counter("aab"), "e": range(3)}
    assert node.run(lambda x: x, value) == value
    array = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    back = node.run(lambda x: x * 2, array)
    np.testing.assert_array_equal(back, array * 2)
    back += 1  # and it can be written to


def test_a_large_payload_goes_in_pieces_both_ways(node: skyproxy.Node) -> None:
    array = np.random.default_rng(0).integers(0, 255, 5_000_001, dtype=np.uint8)
    back = node.run(lambda x, y: (x[::-1].copy(), y), array, "beside it")
    np.testing.assert_array_equal(back[0], array[::-1])
    assert back[1] == "beside it"


def test_cpu_tensors_travel_by_value_and_keep_what_they_share(node: skyproxy.Node) -> None:
    base = torch.arange(10.0)

    def look(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[object]:
        a[0] = 100
        return [a is c, b[0].item(), a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()]

    assert node.run(look, base, base[:3], base) == [True, 100.0, True]
    assert base[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int8])
def test_a_slice_of_a_large_tensor_takes_only_its_own_bytes(node: skyproxy.Node, dtype: torch.dtype) -> None:
    large = torch.arange(1_000_000).to(dtype)
    before = torch.sky.stats()["bytes_sent"]
    back = node.submit(lambda x: x, large[500_001:500_005], results="value").result()
    assert torch.sky.stats()["bytes_sent"] - before < 20_000
    assert torch.equal(back, large[500_001:500_005])


def test_conjugated_views_and_empty_tensors_by_value(node: skyproxy.Node) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    back = node.submit(lambda *x: x, z.conj(), z.imag, torch.empty(0, 3), z.conj().imag, results="value").result()
    assert torch.equal(back[0], z.conj())
    assert torch.equal(back[1], z.imag)
    assert back[2].shape == (0, 3)
    assert torch.equal(back[3], z.conj().imag)


def test_a_remote_argument_is_the_real_tensor(node: skyproxy.Node, sky: str) -> None:
    x = torch.arange(6.0, device=sky)
    x.mul_(2)  # recorded just before: the function sees it

    def look(t: torch.Tensor) -> tuple[str, list[float], str]:
        return type(t).__name__, t.tolist(), t.device.type

    assert node.run(look, x) == ("Tensor", [0, 2, 4, 6, 8, 10], "cpu")


def test_a_remote_argument_is_no_copy(node: skyproxy.Node, sky: str) -> None:
    x = torch.zeros(3, device=sky)
    version = x._version
    node.run(lambda t: t.add_(5).sum().item(), x)
    assert x.tolist() == [5, 5, 5]
    assert x._version > version  # so that autograd notices


def test_a_large_upload_just_before_is_waited_for(node: skyproxy.Node, sky: str) -> None:
    values = torch.randn(600_000)
    assert node.run(lambda t: t.double().sum().item(), values.to(sky)) == pytest.approx(values.double().sum().item())


def test_results_stay_on_the_worker(node: skyproxy.Node, sky: str) -> None:
    received = torch.sky.stats()["bytes_received"]
    made = node.run(lambda: torch.arange(1_000_000.0))
    assert made.device == torch.device(sky)
    assert torch.sky.stats()["bytes_received"] - received < 10_000
    assert (made[:3] + 1).tolist() == [1, 2, 3]


def test_results_by_value_come_to_the_cpu(node: skyproxy.Node) -> None:
    made = node.submit(lambda: [torch.ones(3)] * 2, results="value").result()
    assert made[0].device.type == "cpu"
    assert made[0] is made[1]
    assert made[0].tolist() == [1, 1, 1]


def test_results_that_share_memory_share_it_here(node: skyproxy.Node) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        base = torch.zeros(10)
        return base[2:4], base, base

    view, base, same = node.run(make)
    assert base is same
    view.fill_(7)
    assert base.tolist() == [0, 0, 7, 7, 0, 0, 0, 0, 0, 0]
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert view.untyped_storage().nbytes() == 40


def test_an_argument_that_is_returned_is_the_very_same_object(node: skyproxy.Node, sky: str) -> None:
    x = torch.arange(4.0, device=sky)
    same, part = node.run(lambda t: (t, t[1:]), x)
    assert same is x
    part.zero_()
    assert x.tolist() == [0, 0, 0, 0]


def test_an_argument_that_got_another_storage_is_another_tensor(node: skyproxy.Node, sky: str) -> None:
    def swap(t: torch.Tensor) -> torch.Tensor:
        t.data = torch.full((2,), 9.0)
        return t

    x = torch.zeros(3, device=sky)
    assert node.run(swap, x).tolist() == [9, 9]
    assert x.tolist() == [0, 0, 0]


def test_a_function_names_the_class_of_remote_tensors_and_has_local_ones(node: skyproxy.Node, sky: str) -> None:
    kind = skyproxy.RemoteTensor
    x = torch.ones(2, device=sky)
    assert isinstance(x, kind)
    assert node.run(lambda: (isinstance(x, kind), kind)) == (False, kind)


def test_a_module_comes_back_as_the_local_class_with_remote_weights(node: skyproxy.Node, sky: str) -> None:
    module = node.run(Doubling)
    assert type(module) is Doubling
    assert module.inner is module.tied
    assert {p.device for p in module.parameters()} == {torch.device(sky)}
    assert all(p.is_leaf and p.requires_grad and isinstance(p, torch.nn.Parameter) for p in module.parameters())
    assert list(dict(module.named_buffers())) == ["scale", "hidden"]
    assert list(module.state_dict()) == ["scale", "inner.weight", "inner.bias", "tied.weight", "tied.bias"]
    module(torch.ones(1, 4, device=sky)).sum().backward()
    assert module.inner.weight.grad.shape == (4, 4)


def test_a_remote_module_as_argument_trains_in_place(node: skyproxy.Node, sky: str) -> None:
    torch.manual_seed(0)
    local, x = Doubling(), torch.randn(8, 4)
    remote = Doubling()
    remote.load_state_dict(local.state_dict())
    remote.to(sky)

    def step(model: torch.nn.Module, batch: torch.Tensor) -> float:
        assert all(p.is_leaf and p.requires_grad for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    assert [node.run(step, remote, x.to(sky)) for _ in range(3)] == [step(local, x) for _ in range(3)]
    assert torch.equal(remote.inner.weight.cpu(), local.inner.weight)


def test_gradients_are_on_and_tensors_are_leaves(node: skyproxy.Node, sky: str) -> None:
    x = torch.ones(3, device=sky, requires_grad=True)

    def differentiate(t: torch.Tensor) -> torch.Tensor:
        (t.square() * 3).sum().backward()
        return t.grad

    assert node.run(differentiate, x).tolist() == [6, 6, 6]
    assert node.run(lambda t: t * 2, x).requires_grad


def test_containers_and_classes_with_tensors_inside(node: skyproxy.Node, sky: str) -> None:
    Point = collections.namedtuple("Point", "x y")

    def make(p: Point) -> dict[str, object]:
        return {"measured": Measured("w", p.x * 2), "point": Point(p.y, [p.x])}

    made = node.run(make, Point(torch.ones(2, device=sky), 5))
    assert type(made["measured"]) is Measured
    assert made["measured"].weights.tolist() == [2, 2]
    assert made["point"].y[0].tolist() == [1, 1]


def test_sparse_results(node: skyproxy.Node) -> None:
    made = node.run(lambda: torch.eye(3).to_sparse())
    assert made.layout is torch.sparse_coo
    assert torch.equal(made.to_dense().cpu(), torch.eye(3))


def test_tensor_attributes_travel(node: skyproxy.Node) -> None:
    def make() -> torch.Tensor:
        made = torch.nn.Parameter(torch.ones(2))
        made.tag = {"kind": "lora"}
        return made

    assert node.run(make).tag == {"kind": "lora"}


def test_a_sky_device_arrives_as_the_worker_device(node: skyproxy.Node, sky: str) -> None:
    made = node.run(lambda device: torch.ones(2, device=device), torch.device(sky))
    assert made.device == torch.device(sky)


def test_tensors_of_another_worker_are_refused(node: skyproxy.Node, sky: str, sky1: str) -> None:
    with pytest.raises(ConfigurationError, match="another worker"):
        node.run(torch.sum, torch.ones(2, device=sky1))
    with pytest.raises(ConfigurationError, match="two workers"):
        node.run(torch.add, torch.ones(2, device=sky), torch.ones(2, device=sky1))


def test_what_cannot_be_pickled_is_said_before_anything_is_sent(node: skyproxy.Node) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"cannot be sent to a worker: .*, in the outer function's lock. Its"):
        node.run(lambda: lock.locked())
    with pytest.raises(ConfigurationError, match=r"in the argument options\['locks'\]\[1\]. Its"):
        node.run(dict, 1, options={"locks": [2, lock]})
    names: dict[str, Any] = {"LOCK": lock, "__name__": "__main__"}
    exec("def uses_a_lock(): return LOCK.locked()", names)
    with pytest.raises(ConfigurationError, match=r"in the global LOCK\. Its"):
        node.run(names["uses_a_lock"])


def test_what_cannot_be_sent_back_is_named(node: skyproxy.Node) -> None:
    with pytest.raises(TypeError, match=r"a dict cannot be pickled \(.*, in result\['lock'\]\)"):
        node.run(lambda: {"loss": 1.0, "lock": threading.Lock()})


def test_complex_numbers_travel(node: skyproxy.Node) -> None:
    assert node.run(lambda number: [number * 2, number.conjugate()], 1 + 2j) == [2 + 4j, 1 - 2j]


def test_a_function_may_have_any_argument(node: skyproxy.Node) -> None:
    assert node.run(lambda **given: given, fn=1, self=2, args=3) == {"fn": 1, "self": 2, "args": 3}


def test_a_poisoned_argument_raises_the_error_of_the_operation(node: skyproxy.Node, sky: str) -> None:
    bad = torch.zeros(3, device=sky)[torch.full((1,), 7, device=sky)]
    with pytest.raises(IndexError) as caught:
        node.run(torch.sum, bad)
    assert isinstance(caught.value, RemoteError)
    assert "test_values.py" in caught.value.user_line
    assert node.run(lambda: 1) == 1


def test_one_payload_for_several_workers(node: skyproxy.Node, other_node: skyproxy.Node) -> None:
    payload = Payload.of(os.getpid)
    calls = [each.submit_payload(payload) for each in (node, other_node)]
    assert [call.result() for call in calls] == [node.process_id, other_node.process_id]


def test_nothing_leaks(node: skyproxy.Node, sky: str) -> None:
    x = torch.ones(4, device=sky)
    node.run(lambda t: t, x)
    before = handles(node)
    for _ in range(5):
        made = node.run(lambda t: [t + 1, t[1:], torch.nn.Linear(2, 2)], x)
    del made
    call = node.submit(lambda: torch.ones(1000))  # never read
    call._first_event()
    del call
    kept = node.run(lambda: torch.ones(2))
    assert handles(node) == before + 1
    assert kept.tolist() == [1, 1]


def test_the_same_result_is_the_same_object(node: skyproxy.Node) -> None:
    call = node.submit(lambda: torch.ones(2))
    assert call.result() is call.result()


def test_async_functions_run_to_their_end(node: skyproxy.Node) -> None:
    async def later(x: int) -> int:
        import asyncio

        await asyncio.sleep(0)
        return x + 1

    assert node.run(later, 1) == 2


def test_functions_may_use_modules_that_are_no_plain_modules(node: skyproxy.Node) -> None:
    assert node.run(lambda: torch.ops.aten.add.Tensor(torch.ones(2), torch.ones(2)).tolist()) == [2, 2]


def test_a_class_that_both_sides_can_import_is_one_class(
    node: skyproxy.Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared_shapes.py").write_text("class Shape:\n    def __init__(self, n): self.n = n\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shared_shapes

    def make(folder: str) -> object:
        import sys

        sys.path.insert(0, folder)
        try:
            import shared_shapes as theirs
        finally:
            sys.path.remove(folder)
        return theirs.Shape(3)

    made = node.run(make, str(tmp_path))
    assert type(made) is shared_shapes.Shape
    assert made.n == 3


def test_arguments_do_not_live_longer_than_their_call(node: skyproxy.Node, sky: str) -> None:
    x = torch.ones(3, device=sky)
    before = handles(node)
    call = node.submit(torch.sum, x + 1)
    assert call.result(60).item() == 6
    assert handles(node) == before + 1
    del call


def test_a_call_may_be_dropped_while_a_graph_is_captured(node: skyproxy.Node, sky: str) -> None:
    x = torch.ones(2, device=sky)
    call = node.submit(lambda: torch.ones(1000))
    call._first_event(60)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        y = x + 1
        del call
        gc.collect()
    graph.replay()
    assert y.tolist() == [2, 2]


def test_cached_and_dispatching_functions_travel_as_code(node: skyproxy.Node) -> None:
    @functools.lru_cache(maxsize=3)
    def cached(x: int) -> int:
        return x + 1

    @functools.singledispatch
    def kind(x: object) -> str:
        return "other"

    @kind.register
    def _(x: int) -> str:
        return "int"

    class Lazy:
        @functools.cached_property
        def half(self) -> int:
            return 2

    def use() -> tuple[object, ...]:
        return cached(1), cached.cache_info().maxsize, kind(1), kind("a"), Lazy().half

    assert node.run(use) == (2, 3, "int", "other", 2)
    assert node.run(cached, 2) == 3


def test_packed_sequences_are_arguments_and_results(node: skyproxy.Node, sky: str) -> None:
    rows = [torch.arange(3.0), torch.arange(2.0)]
    packed = torch.nn.utils.rnn.pack_sequence([row.to(sky) for row in rows])
    for sent in (packed, torch.nn.utils.rnn.pack_sequence(rows)):
        made = node.run(lambda given: (given, torch.nn.utils.rnn.pack_sequence([given.data])), sent)
        assert [one.data.device.type for one in made] == ["sky", "sky"]
        assert [one.batch_sizes.device.type for one in made] == ["cpu", "cpu"]
        unpacked, sizes = torch.nn.utils.rnn.pad_packed_sequence(made[0], batch_first=True)
        assert (unpacked.tolist(), sizes.tolist()) == ([[0, 1, 2], [0, 1, 0]], [3, 2])
    assert made[1].batch_sizes.tolist() == [1] * 5


def test_generators_are_arguments_and_results_in_the_state_that_they_had(node: skyproxy.Node, sky: str) -> None:
    def draw(generator: torch.Generator) -> tuple[list[float], torch.Generator]:
        return torch.rand(2, generator=generator).tolist(), generator

    expected, after = draw(torch.Generator().manual_seed(3))
    for device in ("cpu", sky):
        generator = torch.Generator(device=device).manual_seed(3)
        drawn, came = node.run(draw, generator)
        assert drawn == expected
        assert torch.equal(came.get_state(), after.get_state())
        assert torch.rand(2, device=device, generator=generator).tolist() == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_arguments_and_results(node: skyproxy.Node, sky: str) -> None:
    rows = [torch.arange(2.0), torch.arange(3.0)]
    for sent in (torch.nested.nested_tensor(rows), torch.nested.nested_tensor(rows, device=sky, requires_grad=True)):
        made = node.run(lambda given: {"doubled": given.detach() * 2, "same": given}, sent)
        for name, factor in {"doubled": 2, "same": 1}.items():
            assert made[name].is_nested
            assert made[name].device.type == "sky"
            assert [row.tolist() for row in made[name].unbind()] == [(row * factor).tolist() for row in rows]
        assert made["same"].requires_grad is sent.requires_grad
    by_value = node.submit(lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), results="value").result()
    assert (by_value.device.type, [len(row) for row in by_value.unbind()]) == ("cpu", [1, 2])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_result_without_memory_to_lend_is_refused_by_name(node: skyproxy.Node) -> None:
    def make(layout: torch.layout) -> torch.Tensor:
        return torch.eye(2).to_sparse(layout=layout)

    for layout in (torch.sparse_coo, torch.sparse_csr):
        with pytest.raises(TypeError, match=f"layout {layout} on cpu has no memory"):
            node.submit(make, layout, isolate=True).result()
    assert node.submit(torch.ones, 0, isolate=True).result().shape == (0,)
