"""Questions that follow from sizes and uploads alone are answered here, and writes make them questions again."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import skyproxy
from tests.tensor.core.test_host_copies import trips, waits

TOKENS = torch.tensor([[5, 3, 0, 7], [1, 0, 0, 2]])
Question = Callable[[torch.Tensor], torch.Tensor]


def packed(positions: torch.Tensor) -> torch.Tensor:
    """What transformers asks of positions: whether each follows on the one before."""
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)[:, -1]


QUESTIONS: dict[str, Question] = {
    "ends": lambda x: x[:, [-1, 0]] == 0,
    "arithmetic": lambda x: 3 - (x * 2 + x - 1),
    "comparisons": lambda x: ((x > 0) & (x <= 5)) | ~(x != 7),
    "logic": lambda x: torch.logical_or(torch.logical_not(x.bool()), torch.logical_and(x == 1, x >= 0)),
    "joined": lambda x: torch.cat([x, x[:, :1] + 1], dim=1).cumsum(-1),
    "dtypes": lambda x: (x.int() + 1).to(torch.uint8).clone(),
    "transposed": lambda x: x.t() + x.t(),
    "some": lambda x: torch.stack([(x == 9).any(), (x < 9).all()]) if x.is_cpu else (x == 9).any(),
    "rows": lambda x: (x == 0).any(dim=1, keepdim=True),
    "packed": packed,
    "positions": lambda x: packed((torch.arange(4, device=x.device) + 2).unsqueeze(0).expand(2, -1)),
    "packed positions": lambda x: packed((torch.arange(4, device=x.device) // 2 * 0 + x[:1]).expand(2, -1)),
    "made here": lambda x: (
        torch.ones(2, 3, dtype=torch.long, device=x.device) + torch.zeros(3, dtype=torch.long, device=x.device)
    ),
    "wrapped around": lambda x: x.to(torch.int8) * 127 + torch.arange(120, 124, dtype=torch.int8, device=x.device),
}


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name not in ("some", "packed positions")])
def test_what_follows_from_uploads_and_sizes_needs_no_wait(name: str, sky1: str) -> None:
    expected = QUESTIONS[name](TOKENS)
    found = QUESTIONS[name](TOKENS.to(sky1))
    waits(found.tolist, expected.tolist())
    waits(lambda: bool(QUESTIONS[name](TOKENS.to(sky1)).all()), bool(expected.all()))
    there = (found + torch.zeros((), dtype=torch.float64, device=sky1)).cpu()  # what the worker has
    assert there.tolist() == expected.double().tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_where_a_fraction_is_among_uploaded_ones_needs_no_wait(dtype: torch.dtype, sky1: str) -> None:
    times = torch.tensor([999.0, 666.5, 333.25, float("nan"), -0.0, float("inf"), 0.0], dtype=dtype)
    there = times.to(sky1)

    def look_up(times: torch.Tensor) -> list[object]:
        found: list[object] = [(times == times[place]).nonzero().flatten().tolist() for place in (0, 1, 2, 4, 5)]
        return [*found, (times[1:] <= times[:-1]).tolist(), (times != times).nonzero().item(), (times > 333).tolist()]

    waits(lambda: look_up(there), look_up(times))
    there[0] = 333.25
    assert (there == there[2]).nonzero().flatten().tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("end", ["least", "largest"])
def test_whether_a_subnormal_number_is_zero_says_the_worker(end: str, dtype: torch.dtype, sky1: str) -> None:
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([torch.finfo(dtype).eps * tiny, 0.0, 1.0], dtype=torch.float64).to(dtype)
    if end == "largest":
        values[0] = tiny - values[0].double()
    there = values.to(sky1)
    before = trips()
    assert (there == 0).tolist() == [False, True, False]
    assert trips() > before
    torch.set_flush_denormal(True)
    try:
        assert (there == 0).tolist() == (values == 0).tolist()
    finally:
        torch.set_flush_denormal(False)


def test_a_loop_that_compares_numbers_of_a_small_tensor_waits_twice(sky1: str) -> None:
    """As the search for limits of a histogram does, which looks at each of thousands of sums."""
    sums = torch.rand(500, generator=torch.Generator().manual_seed(2)).cumsum(0)
    there = sums.to(sky1) * 1  # what the client knows nothing of

    def search(sums: torch.Tensor) -> tuple[int, int, bool]:
        first, last = 0, len(sums) - 1
        while first < last and sums[first] < 31.5:
            first += 1
        while last > first and sums[last] > torch.tensor(93.25, device=sums.device):
            last -= 1
        return first, last, bool(sums[3] == sums[4])

    waits(lambda: search(there), search(sums), most=2)
    there[3] = there[4]
    assert bool(there[3] == there[4])
    there *= 1
    before = trips()
    assert bool(there[0] < 1.5)
    assert trips() == before + 1, "asked once, a number comes alone"


def test_a_comparison_counts_as_its_numbers_were(sky1: str) -> None:
    x = torch.arange(8.0).to(sky1) * 1
    early = [x[place] > 4 for place in range(8)]
    assert [bool(answer) for answer in early[:4]] == [False] * 4
    late = [x[place] > 4 for place in range(8)]
    x.add_(4)
    assert [bool(answer) for answer in early[4:]] == [False, True, True, True]
    assert [bool(answer) for answer in late] == [False] * 5 + [True] * 3
    assert [bool(x[place] > 4) for place in range(8)] == [False] + [True] * 7
    x.data.fill_(0)
    assert not any(bool(x[place] > 4) for place in range(8))


def test_numbers_that_came_another_way_meanwhile_are_not_taken_for_those_of_before(sky1: str) -> None:
    x = torch.arange(8.0).to(sky1) * 1
    answers = [x[place] > 4 for place in range(8)]
    assert not bool(answers[0])
    assert x[1].item() == 1  # all of them are known now, and where they are is another place
    x.add_(10)
    assert [bool(answer) for answer in answers] == [False] * 5 + [True] * 3
    assert all(bool(x[place] > 4) for place in range(8))


def test_numbers_that_are_asked_for_after_a_write_are_not_taken_for_those_of_before(sky1: str) -> None:
    x = torch.arange(8.0).to(sky1) * 1
    early = [x[place] > 4 for place in range(8)]
    assert not bool(early[0])
    x[1].item()
    x.add_(10)
    late = [x[place] > 14 for place in range(8)]
    assert not bool(late[0])
    assert [bool(answer) for answer in early] == [False] * 5 + [True] * 3
    assert [bool(answer) for answer in late] == [False] * 5 + [True] * 3


def test_numbers_that_change_while_they_are_fetched_are_not_taken_for_those_of_before(
    sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(8.0).to(sky1) * 1
    answers = [x[place] > 4 for place in range(8)]
    assert not bool(answers[0])
    session = x._sky.device.session  # type: ignore[attr-defined]
    fetch = session.fetch

    def fetch_after_a_write(*args: object) -> torch.Tensor:
        monkeypatch.undo()
        x.add_(10)  # as another thread may
        found: torch.Tensor = fetch(*args)
        return found

    monkeypatch.setattr(session, "fetch", fetch_after_a_write)
    assert [bool(answer) for answer in answers] == [False] * 5 + [True] * 3
    assert session.fetch == fetch, "the write was never made"


def test_what_a_comparison_was_made_of_is_let_go(sky1: str) -> None:
    gc.collect()
    gc.disable()
    try:
        before = torch.sky.memory_allocated(sky1)
        x = torch.arange(1000.0).to(sky1) * 1
        assert [bool(x[place] > 4) for place in range(3)] == [False] * 3
        del x
        assert torch.sky.memory_allocated(sky1) == before
    finally:
        gc.enable()


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "an element": lambda x: x.__setitem__(0, 9),
    "a view": lambda x: x.view(-1)[1:].zero_(),
    "copied into": lambda x: x.copy_(torch.full_like(x, 3)),
    "out": lambda x: torch.add(torch.full_like(x, 3), 1, out=x),
    "a list": lambda x: torch._foreach_add_([x, x.clone()], 5),
    "indexed": lambda x: x.index_fill_(0, torch.tensor([0]).to(x.device), 8),
    "random": lambda x: x.random_(5, 6),
    "set": lambda x: x.set_(torch.full_like(x, 4)),
    "data": lambda x: setattr(x, "data", torch.full_like(x, 4)),
}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("make", ["arange", "sum"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen(name: str, make: str, asked: bool, sky1: str) -> None:
    def changed(device: str) -> list[object]:
        positions = torch.arange(6, device=device)
        x = positions if make == "arange" else positions + 1
        before, view = x == 3, x[2:]
        if asked:
            assert bool(before.any())
        WRITES[name](x)
        after = x + 1
        return [x.tolist(), view.tolist(), before.tolist(), after.tolist(), bool((x[:1] == 4).all())]

    assert changed(sky1) == changed("cpu")


def test_operands_count_as_they_were(sky1: str) -> None:
    tokens = TOKENS.to(sky1)
    doubled = tokens + tokens
    tokens.zero_()
    waits(doubled.tolist, (TOKENS + TOKENS).tolist())
    assert tokens.tolist() == torch.zeros_like(TOKENS).tolist()


def test_writes_that_are_no_operations_are_seen(sky1: str) -> None:
    node = next(node for node in skyproxy.list_nodes() if torch.device(sky1) in node.devices)
    x = torch.arange(4, device=sky1) + 1
    node.run(torch.Tensor.add_, x, 1)
    assert x.tolist() == [2, 3, 4, 5]
    y = torch.arange(4, device=sky1) + 1
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        y.add_(10)
    graph.replay()
    assert y.tolist() == [11, 12, 13, 14]


def test_what_is_computed_of_unknown_numbers_is_asked_for(sky1: str) -> None:
    unknown = torch.randint(0, 1, (4,), device=sky1)
    found = torch.arange(4, device=sky1) + unknown
    waits(found.tolist, [0, 1, 2, 3], most=1)
    assert (torch.arange(4, device=sky1) / 2).tolist() == [0, 0.5, 1, 1.5]


MADE_WITH_FRACTIONS: dict[str, Question] = {
    "converted": lambda x: torch.tensor([0.0, 1.0]).to(x.device).long(),
    "negated": lambda x: torch.tensor([0.0, 1.0]).to(x.device).logical_not(),
    "compared": lambda x: x > 0.5,
    "of half precision": lambda x: torch.tensor([0.0, 1.0], dtype=torch.float16).to(x.device) > 0.1,
}


@pytest.mark.parametrize("name", MADE_WITH_FRACTIONS)
def test_what_is_made_with_fractions_in_another_way_is_asked_for(name: str, sky1: str) -> None:
    x = torch.arange(2)
    expected = MADE_WITH_FRACTIONS[name](x).tolist()
    found = MADE_WITH_FRACTIONS[name](x.to(sky1))
    before = trips()
    assert found.tolist() == expected
    assert trips() == before + 1


def test_a_later_default_dtype_does_not_decide_a_comparison(sky1: str) -> None:
    large = torch.tensor([2**24 + 1])
    expected, found = large == float(2**24), large.to(sky1) == float(2**24)
    torch.set_default_dtype(torch.float64)
    try:
        assert found.tolist() == expected.tolist() == [True]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_chain_ends(sky1: str) -> None:
    total, expected = torch.arange(3, device=sky1), torch.arange(3)
    for _ in range(40):
        total, expected = total + total[:1] - 1, expected + expected[:1] - 1
    before = trips()
    assert total.tolist() == expected.tolist()
    assert trips() == before + 1
    wide = torch.arange(40_000, device=sky1) + 1  # larger than what is kept
    assert wide[-1].item() == 40_000


def test_what_is_kept_no_longer_holds_nothing_of_how_it_was_made(sky1: str) -> None:
    made = [torch.arange(3, device=sky1) + 1 for _ in range(100)]
    assert sum(tensor._sky.copy.later is not None for tensor in made) <= 64  # type: ignore[attr-defined]
    assert all(tensor.tolist() == [1, 2, 3] for tensor in (made[0], made[-1]))
