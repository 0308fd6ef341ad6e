"""Results whose sizes depend on values are asked for once: again only where something has written to those values."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import skyproxy
from skyproxy.tensor.core import host_copies
from tests.tensor.core.test_host_copies import SOURCES, WRITES, made, write_to

LENGTH = 20_000  # beyond what is known byte by byte


def trips() -> int:
    return int(torch.sky.stats()["round_trips"])


def test_training_with_masks_that_stay_waits_for_nothing(sky: str) -> None:
    torch.manual_seed(0)
    features, labels, mask = torch.randn(LENGTH, 4), torch.randint(3, (LENGTH,)), torch.rand(LENGTH) > 0.7
    found = []
    for device in ("cpu", sky):
        x, y, chosen = features.to(device), labels.to(device), mask.to(device)
        w = torch.ones(4, 3, device=device).requires_grad_()
        for step in range(4):
            before = trips()
            (F.cross_entropy((x @ w)[chosen], y[chosen]) + x.masked_select(chosen[:, None]).sum()).backward()
            torch.sky.synchronize()
            assert trips() - before <= (4 if step == 0 else 1)
        found.append(w.grad.cpu())
    assert torch.equal(*found)


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rows": lambda x, mask: x[mask],
    "columns": lambda x, mask: x.t()[:, mask],
    "numbers": lambda x, mask: x[mask, 1],
    "with positions": lambda x, mask: x[mask, torch.zeros(1, dtype=torch.int64, device=x.device)],
    "a part of a mask": lambda x, mask: x[5:][mask[5:]],
    "every second": lambda x, mask: x[::2][mask[::2]],
    "not": lambda x, mask: x[~mask],
    "masked_select": lambda x, mask: x.masked_select(mask[:, None]),
    "nonzero": lambda x, mask: mask.nonzero(),
    "nonzero, as a tuple": lambda x, mask: torch.stack(mask.nonzero(as_tuple=True)),
    "where": lambda x, mask: torch.where(mask)[0],
    "bytes": lambda x, mask: mask.view(torch.uint8).nonzero(),
    "mask of itself": lambda x, mask: mask[mask],
    "halves": lambda x, mask: x.half()[mask],
}
CHANGES: list[Callable[[torch.Tensor], object]] = [
    lambda mask: mask[3].logical_not_(),
    lambda mask: mask.logical_not_(),
    lambda mask: mask[7:900].fill_(True),
    lambda mask: mask.view(2, -1)[1].zero_(),
    lambda mask: mask.view(torch.uint8).fill_(1),
    lambda mask: mask.copy_(torch.arange(LENGTH) % 3 == 0),
    lambda mask: torch.lt(torch.arange(LENGTH, device=mask.device), 77, out=mask),
    lambda mask: torch._foreach_copy_([*mask[:12], mask], [mask.logical_not()[0]] * 12 + [mask.roll(1)]),
    lambda mask: mask.untyped_storage().fill_(1),
    lambda mask: mask.__setitem__(mask.clone(), False),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_follows_its_mask(kind: str, sky: str) -> None:
    torch.manual_seed(1)
    x, mask = torch.randn(LENGTH, 2), torch.rand(LENGTH) > 0.5
    ours, theirs = (x.to(sky), mask.to(sky)), (x, mask)
    for change in (lambda mask: None, *CHANGES):
        change(ours[1])
        change(theirs[1])
        for _ in range(2):
            assert torch.equal(KINDS[kind](*ours).cpu(), KINDS[kind](*theirs))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("write", WRITES)
def test_what_writes_to_a_storage_is_noticed(write: str, source: str, sky: str) -> None:
    x = made(source, write, sky)
    positions, part = x.nonzero(), x[1:].nonzero()
    assert (len(positions), len(x.nonzero()), len(part), len(x[1:].nonzero())) == (5, 5, 5, 5)
    write_to(x, write)
    assert x.nonzero().tolist() == [[i] for i in range(6)]
    assert len(x[1:].nonzero()) == 5


@pytest.mark.parametrize("seed", range(6))
def test_programs_of_views_changes_and_masks(seed: int, sky: str) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    x, base = torch.randn(LENGTH, 2), torch.rand(LENGTH) > 0.5
    far = x.to(sky)
    pairs = [(base.to(sky), base)]
    for _ in range(60):
        ours, theirs = draw.choice(pairs)
        chance = draw.random()
        if chance < 0.2:
            view = draw.choice([lambda t: t.detach(), lambda t: t.view(-1), lambda t: t[:], lambda t: t.data])
            pairs.append((view(ours), view(theirs)))
        elif chance < 0.45:
            change = draw.choice(CHANGES)
            change(ours)
            change(theirs)
        else:
            kind = draw.choice(list(KINDS.values()))
            assert torch.equal(kind(far, ours).cpu(), kind(x, theirs))


def test_many_masks_are_each_their_own(sky: str) -> None:
    x = torch.arange(10, device=sky)
    masks = [torch.arange(10, device=sky) < number % 10 for number in range(200)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "_MOST_WATCHED", 64)
        host_copies._watched.clear()
        for _ in range(2):
            assert [len(x[mask]) for mask in masks] == [number % 10 for number in range(200)]
        assert len(host_copies._watched) <= 64


def test_what_two_masks_choose_is_asked_for_once_until_one_is_written(sky: str) -> None:
    torch.manual_seed(2)
    x, rows = torch.randn(64, 64), torch.rand(64) > 0.5
    columns = rows.roll(3)
    far, far_rows, far_columns = x.to(sky), rows.to(sky), columns.to(sky)
    view = far_columns[:32]

    def check(waits: int) -> None:
        before = trips()
        found = far[far_rows, far_columns]
        assert trips() - before == waits
        assert torch.equal(found.cpu(), x[rows, columns])

    check(1)
    check(0)
    for ours, theirs in ((view, columns[:32]), (far_rows, rows)):
        for each in (ours, theirs):
            each.copy_(each.roll(1))
        check(1)
        check(0)
    before = trips()
    far[far_columns, far_rows]
    assert trips() - before == 1


def test_what_a_thread_writes_while_the_size_is_asked_for_is_noticed(sky: str) -> None:
    x, mask = torch.arange(LENGTH, device=sky), torch.arange(LENGTH, device=sky) < 5
    begun, written = threading.Event(), threading.Event()

    def write() -> None:
        begun.wait(30)
        mask.fill_(True)
        written.set()

    def stop(purpose: str) -> None:
        if purpose == "aten::index.Tensor" and not begun.is_set():
            begun.set()
            assert written.wait(30)

    thread = threading.Thread(target=write)
    thread.start()
    with skyproxy.nodes.observing(stop):
        assert len(x[mask]) in (5, LENGTH)
    thread.join()
    assert len(x[mask]) == LENGTH


def test_what_a_function_writes_is_noticed(sky: str) -> None:
    x, mask = torch.arange(LENGTH, device=sky), torch.arange(LENGTH, device=sky) < 5
    assert len(x[mask]) == 5
    node = next(node for node in skyproxy.list_nodes() if node.alive)

    def fill(mask: torch.Tensor) -> None:
        mask.fill_(True)

    node.run(fill, mask)
    assert len(x[mask]) == LENGTH


ATEN = torch.ops.aten
INTO: dict[str, tuple[int, Callable[..., object]]] = {
    "index": (1, lambda x, out: ATEN.index.Tensor_out(x, [x > 0], out=out)),
    "masked_select": (1, lambda x, out: torch.masked_select(x, x > 0, out=out)),
    "nonzero": (1, lambda x, out: torch.nonzero(x, out=out)),
    "bincount": (1, lambda x, out: ATEN.bincount.out(x.flatten(), out=out)),
    "_unique": (2, lambda x, *out: ATEN._unique.out(x, True, True, out0=out[0], out1=out[1])),
    "_unique2": (3, lambda x, *out: ATEN._unique2.out(x, True, True, True, **named(out))),
    "unique_dim": (3, lambda x, *out: ATEN.unique_dim.out(x, 0, True, True, True, **named(out))),
    "unique_consecutive": (3, lambda x, *out: ATEN.unique_consecutive.out(x, True, True, **named(out))),
    "unique_dim_consecutive": (3, lambda x, *out: ATEN.unique_dim_consecutive.out(x, 0, True, True, **named(out))),
}


def named(out: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return {f"out{number}": tensor for number, tensor in enumerate(out)}


@pytest.mark.parametrize("name", INTO)
def test_given_results_have_the_size_that_the_values_say_each_time(sky: str, name: str) -> None:
    count, function = INTO[name]
    for values in ([[3, 3], [1, 0]], [[0, 0], [0, 0]], [[1, 2], [3, 4]], [[3, 3], [1, 0]]):
        found = []
        for device in ("cpu", sky):
            out = [torch.empty(0, dtype=torch.int64, device=device) for _ in range(count)]
            function(torch.tensor(values).to(device), *out)
            found.append([tensor.cpu() for tensor in out])
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_autograd_asks_of_an_index_has_the_size_of_its_values(sky: str) -> None:
    """Up to torch 2.12 the derivative of `index_fill` finds the different ones of the index by `_unique`."""
    for values in ([0, 1, 2], [0, 0, 0], [2, 1, 2]):
        assert torch.equal(torch._unique(torch.tensor(values).to(sky))[0].cpu(), torch.tensor(values).unique())
        x, value = torch.ones(3, 4, device=sky, requires_grad=True), torch.tensor(2.0, device=sky, requires_grad=True)
        x.index_fill(0, torch.tensor(values).to(sky), value).square().sum().backward()
        assert value.grad.item() == 16 * len(set(values))
