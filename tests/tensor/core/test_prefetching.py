"""Many values that are asked for in a known order cost a wait for a block of them, and are never old."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.tensor.core.prefetching import READER, reading_ahead

LAYERS = 60


def round_trips(action: Callable[[], object]) -> int:
    before: int = torch.sky.stats()["round_trips"]  # type: ignore[attr-defined]
    action()
    return torch.sky.stats()["round_trips"] - before  # type: ignore[attr-defined,no-any-return]


def model(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(LAYERS // 2)]
    return nn.Sequential(*layers)


def test_a_module_comes_back_in_blocks(sky1: str) -> None:
    local = model()
    remote = copy.deepcopy(local).to(sky1)
    tensors = len(local.state_dict())
    assert tensors > 200
    assert round_trips(remote.cpu) <= tensors // 64 + 2
    for ours, theirs in zip(remote.state_dict().values(), local.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_module_goes_to_another_worker_in_blocks(sky: str, sky1: str) -> None:
    local = model()
    remote = copy.deepcopy(local).to(sky)
    tensors = len(local.state_dict())
    assert round_trips(lambda: remote.to(sky1)) <= tensors // 64 + 2
    for ours, theirs in zip(remote.state_dict().values(), local.state_dict().values(), strict=True):
        assert ours.device == torch.device(sky1)
        assert torch.equal(ours.cpu(), theirs)


def test_a_checkpoint_is_saved_in_blocks(sky1: str) -> None:
    remote = model().to(sky1)
    optimizer = torch.optim.AdamW(remote.parameters())
    remote(torch.randn(3, 4, device=sky1)).sum().backward()
    optimizer.step()
    state = {"model": remote.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    assert round_trips(lambda: torch.save(state, file)) <= 12
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    for name, value in remote.state_dict().items():
        assert torch.equal(loaded["model"][name], value.cpu()), name
    for number, moments in optimizer.state_dict()["state"].items():
        assert torch.equal(loaded["optimizer"]["state"][number]["exp_avg"], moments["exp_avg"].cpu())


def test_safetensors_are_written_in_blocks(sky1: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = model().to(sky1).state_dict()
    assert round_trips(lambda: safetensors.save_file(state, tmp_path / "file")) <= len(state) // 64 + 2
    loaded = safetensors.load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], value.cpu()) for name, value in state.items())


def test_large_tensors_come_in_blocks_that_fit_into_memory(sky1: str) -> None:
    values = [torch.full((1 << 18,), float(i), device=sky1) for i in range(20)]
    found: list[torch.Tensor] = []

    def fetch() -> None:
        with reading_ahead(values):
            found.extend(value.cpu() for value in values)

    assert round_trips(fetch) <= 2
    assert [value[0].item() for value in found] == list(range(20))
    assert all(value.min() == value.max() for value in found)


def test_what_an_operation_may_have_changed_is_asked_for_anew(sky1: str) -> None:
    values = [torch.zeros(2, device=sky1) for _ in range(6)]
    found = []
    with reading_ahead(values):
        for value in values:
            value.add_(1)
            found.append(value.cpu().tolist())
    assert found == [[1, 1]] * 6


def test_a_function_of_ones_own_that_changes_before_it_moves_sees_its_changes(sky1: str) -> None:
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]).to(sky1)
    module._apply(lambda tensor: tensor.detach().zero_().cpu())
    assert all(torch.count_nonzero(p) == 0 for p in module.parameters())


def test_tensors_in_another_order_and_others_are_right_too(sky1: str) -> None:
    values = [torch.full((2,), float(i), device=sky1) for i in range(8)]
    other = torch.full((2,), 99.0, device=sky1)
    with reading_ahead(values):
        found = [value.cpu()[0].item() for value in (values[5], other, values[0], values[5], *reversed(values))]
    assert found == [5, 99, 0, 5, 7, 6, 5, 4, 3, 2, 1, 0]


def test_an_error_reaches_the_one_who_asks_for_its_tensor(sky1: str) -> None:
    good = [torch.ones(2, device=sky1) for _ in range(3)]
    bad = torch.ones(3, device=sky1)[torch.full((1,), 7, device=sky1)]
    with reading_ahead([*good, bad]):
        assert [value.cpu().tolist() for value in good] == [[1, 1]] * 3
        with pytest.raises(IndexError):
            bad.cpu()
    assert READER.ahead is None


def test_nothing_is_asked_for_before_the_first(sky1: str) -> None:
    value = torch.ones(2, device=sky1)
    before = torch.sky.stats()["bytes_received"]  # type: ignore[attr-defined]
    with reading_ahead([value, None, torch.ones(2), value.to_sparse()]):
        pass
    assert torch.sky.stats()["bytes_received"] - before < 4096  # type: ignore[attr-defined]


LOOPS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "comprehension": lambda m: {name: v.cpu() for name, v in m.state_dict().items()},
    "clones": lambda m: {name: v.detach().cpu().clone() for name, v in m.state_dict().items()},
    "to": lambda m: {name: v.to("cpu") for name, v in m.state_dict().items()},
    "numpy": lambda m: {name: torch.as_tensor(v.cpu().numpy()) for name, v in m.state_dict().items()},
}


TENSORS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "named parameters": lambda m: [p.cpu() for _, p in m.named_parameters()],
    "parameters": lambda m: [p.detach().cpu() for p in m.parameters()],
    "numpy": lambda m: [torch.as_tensor(p.detach().cpu().numpy()) for p in m.parameters()],
    "lists": lambda m: [torch.tensor(p.tolist()) for p in m.parameters()],
    "data": lambda m: [p.data.cpu() for p in m.parameters()],
    "buffers": lambda m: [b.cpu() for b in m.buffers()],
    "gradients": lambda m: [p.grad.cpu() for p in m.parameters() if p.grad is not None],
}


@pytest.mark.parametrize("loop", TENSORS)
def test_a_loop_over_what_a_module_has_comes_in_blocks(loop: str, sky1: str) -> None:
    local = model()
    remote = copy.deepcopy(local).to(sky1)
    optimizer = torch.optim.SGD(remote.parameters(), lr=0.1)
    twin = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        twin.zero_grad()
        for module in (local, remote):
            sum((p * p).sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        twin.step()
        expected, before = TENSORS[loop](local), torch.sky.stats()["round_trips"]
        found = TENSORS[loop](remote)
        assert torch.sky.stats()["round_trips"] - before <= len(expected) // 16 + 10
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected) >= 90


def test_a_loop_meets_some_new_tensors_among_known_ones_and_goes_on(sky1: str) -> None:
    remote = model().to(sky1)
    parameters = list(remote.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def read() -> list[torch.Tensor]:
        return [p.grad.cpu() for p in parameters]  # type: ignore[union-attr]

    trips = round_trips(read)
    for parameter in parameters[50:]:
        parameter.grad = torch.full_like(parameter, 2)
    found: list[torch.Tensor] = []
    assert round_trips(lambda: found.extend(read())) <= trips + 1
    assert [value.flatten()[0].item() for value in found] == [1] * 50 + [2] * (len(parameters) - 50)


def test_what_a_loop_over_parameters_changes_on_the_way_is_seen(sky: str) -> None:
    remote = model().to(sky)
    with torch.no_grad():
        for number, parameter in enumerate(remote.parameters()):
            copied = parameter.cpu()
            if number % 10 == 9:
                for other in remote.parameters():
                    other.fill_(number)
            assert number < 10 or torch.equal(copied, torch.full_like(copied, number // 10 * 10 - 1))


def test_what_a_graph_or_a_function_changes_on_the_way_is_seen(sky: str) -> None:
    remote = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)]).to(sky)
    graph, node = torch.sky.SkyGraph(), next(node for node in skyproxy.list_nodes() if node.alive)
    with torch.no_grad(), torch.sky.graph(graph):
        for parameter in remote.parameters():
            parameter.fill_(7)
    for loop in (remote.parameters, lambda: remote.state_dict().values()):
        for change, expected in ((graph.replay, 7), (lambda: node.run(_zero, list(remote.parameters())), 0)):
            copied = [(value.cpu(), change() if number == 9 else None)[0] for number, value in enumerate(loop())]
            assert len(copied) == 16
            assert all((value == expected).all() for value in copied[10:])


def _zero(parameters: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()


def test_a_module_that_was_moved_is_not_kept_and_its_tensors_can_be_swapped(sky: str) -> None:
    remote = model().to(sky)
    values = [p.cpu() for p in remote.parameters()]
    first = next(remote.parameters())
    torch.utils.swap_tensors(first, nn.Parameter(torch.ones_like(first)))
    assert next(remote.parameters()).cpu().min() == 1
    gone = weakref.ref(remote)
    del remote, first
    gc.collect()
    assert gone() is None
    assert len(values) == 2 * LAYERS


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_over_a_state_dict_comes_in_blocks(loop: str, sky1: str) -> None:
    local = model()
    remote = copy.deepcopy(local).to(sky1)
    found: dict[str, torch.Tensor] = {}
    assert round_trips(lambda: found.update(LOOPS[loop](remote))) <= len(local.state_dict()) // 32 + 10
    for name, value in local.state_dict().items():
        assert torch.equal(found[name], value)


def test_a_loop_over_very_many_small_tensors_waits_a_few_times(sky1: str) -> None:
    many = nn.ParameterList(nn.Parameter(torch.full((2,), float(i))) for i in range(2000)).to(sky1)
    found: dict[str, torch.Tensor] = {}
    assert round_trips(lambda: found.update(LOOPS["comprehension"](many))) <= 40
    assert [v[0].item() for v in found.values()] == list(range(2000))


def test_a_block_is_asked_for_in_one_batch(sky: str) -> None:
    state = model().to(sky).state_dict()
    before = torch.sky.stats()  # type: ignore[attr-defined]
    copies = [tensor.cpu() for tensor in state.values()]
    after = torch.sky.stats()  # type: ignore[attr-defined]
    assert len(copies) > 200
    assert after["batches"] - before["batches"] <= after["round_trips"] - before["round_trips"] + 1


def test_what_a_loop_changes_on_the_way_is_seen(sky: str) -> None:
    remote = model().to(sky)
    state = remote.state_dict()
    with torch.no_grad():
        for number, (name, value) in enumerate(state.items()):
            copied = value.cpu()
            if number % 10 == 9:
                for tensor in state.values():
                    tensor.fill_(number)
            assert number < 10 or torch.equal(copied, torch.full_like(copied, number // 10 * 10 - 1)), name


def test_a_loop_that_ends_early_has_not_asked_for_all(sky: str) -> None:
    remote = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(100)]).to(sky)
    torch.sky.synchronize()
    before = torch.sky.stats()["bytes_received"]
    for number, value in enumerate(remote.state_dict().values()):
        value.cpu()
        if number == 4:
            break
    torch.sky.synchronize()
    assert torch.sky.stats()["bytes_received"] - before < 2.5 * 5 * 64 * 64 * 4


def test_a_large_neighbour_is_not_asked_for_by_small_ones(sky: str) -> None:
    remote = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(1024, 1024)).to(sky)
    torch.sky.synchronize()
    before = torch.sky.stats()["bytes_received"]
    values = list(remote.state_dict().values())
    state = remote.state_dict()
    for name in list(state)[:4]:
        state[name].cpu()
    assert len(values) == 6
    torch.sky.synchronize()
    assert torch.sky.stats()["bytes_received"] - before < 100_000


def test_tied_weights_and_other_orders_are_right(sky: str) -> None:
    remote = model()
    remote.append(remote[0])
    remote = remote.to(sky)
    state = remote.state_dict()
    expected = {name: value.cpu() for name, value in state.items()}
    for names in (list(state)[::-1], list(state)[::2], [*state, *state]):
        for name in names:
            assert torch.equal(state[name].cpu(), expected[name])
    state.clear()
    assert torch.equal(remote.state_dict()["0.0.weight"].cpu(), expected["0.0.weight"])


def test_a_state_dict_that_is_gone_is_not_remembered(sky: str) -> None:
    remote = model().to(sky)
    weight = remote.state_dict()["0.0.weight"]
    weight.cpu()
    assert READER.guess is None
