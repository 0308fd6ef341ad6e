"""Numbers that a loop asks for one after another come with the first, and none of them is ever old."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.tensor.ops.companions import Companions, companions_of

STEPS = 14


def trips() -> int:
    return int(torch.sky.stats()["round_trips"])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Give the numbers that were there without a wait, as they are taken."""
    found: list[object] = []
    take = Companions.take

    def counted(self: Companions, handle: Any) -> Any:
        number = take(self, handle)
        if number is not None:
            found.append(number)
        return number

    monkeypatch.setattr(Companions, "take", counted)
    return found


def test_a_step_that_reads_three_numbers_waits_once(sky: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(sky)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(6, 8, device=sky), torch.randint(4, (6,), device=sky)
    waits = []
    for _ in range(2 * STEPS):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        accuracy = (out.argmax(1) == y).float().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        values = torch.stack([loss.detach(), accuracy, norm]).tolist()
        before = trips()
        assert [loss.item(), accuracy.item(), norm.item()] == values
        waits.append(trips() - before)
    assert waits[-STEPS:].count(1) > STEPS // 2  # a collection of garbage may move slots once


def test_numbers_in_a_table_come_together(sky: str) -> None:
    x = torch.arange(12.0, device=sky).reshape(3, 4)
    waits = []
    for step in range(2 * STEPS):
        x = x + 1
        losses = {name: getattr(x, name)() for name in ("sum", "mean", "amax", "amin", "std", "var")}
        before = trips()
        assert [losses[name].item() for name in ("sum", "mean", "amax", "amin")] == [
            66 + 12.0 * (step + 1), 5.5 + step + 1, 12.0 + step, 1.0 + step
        ]  # fmt: skip
        waits.append(trips() - before)
    assert waits[-STEPS:].count(1) > STEPS // 2


def test_numbers_that_are_made_in_between_wait_for_themselves(sky: str, taken: list[object]) -> None:
    x = torch.zeros(3, device=sky)
    for step in range(STEPS):
        x = x + 1
        first, last = x.sum(), x.mean()
        assert first.item() == 3.0 * (step + 1)
        middle = (x * 2).sum()
        assert middle.item() == 6.0 * (step + 1)
        assert last.item() == step + 1
    assert not any(number == 6.0 * STEPS for number in taken)


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "fill_": lambda x, y: y.fill_(-1),
    "a view": lambda x, y: y.view(1)[0].fill_(-1),
    "data": lambda x, y: y.data.fill_(-1),
    "out=": lambda x, y: torch.sub(torch.zeros_like(y), 1, out=y),
    "a list": lambda x, y: torch._foreach_copy_([y], [torch.full((), -1.0, device=y.device)]),
    "a storage": lambda x, y: y.untyped_storage().copy_(torch.full((1,), -1.0).untyped_storage()),
    "copy_": lambda x, y: y.copy_(torch.tensor(-1.0)),
    "new data": lambda x, y: setattr(y, "data", torch.full((), -1.0, device=y.device)),
    "set_": lambda x, y: y.set_(torch.full((), -1.0, device=y.device)),
    "a function": lambda x, y: next(node for node in skyproxy.list_nodes() if node.alive).run(_fill, y),
    "a graph": lambda x, y: _replay(y),
}


def _fill(y: torch.Tensor) -> None:
    y.fill_(-1)


def _replay(y: torch.Tensor) -> None:
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        y.fill_(-1)
    graph.replay()


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_the_question_is_asked_for_anew(change: str, sky: str, taken: list[object]) -> None:
    x = torch.zeros(3, device=sky)
    for step in range(STEPS):
        x = x + 1
        first, last = x.sum(), x.mean()
        assert first.item() == 3.0 * (step + 1)
        if step == STEPS - 1:
            CHANGES[change](x, last)
            assert last.item() == -1
        else:
            assert last.item() == step + 1
    assert taken


def test_another_tensor_in_the_same_slot_is_asked_for(sky: str) -> None:
    x = torch.zeros(3, device=sky)
    companions = companions_of(x._sky.device.session)  # type: ignore[attr-defined]
    replaced = 0
    for step in range(3 * STEPS):
        x = x + 1
        first, last = x.sum(), x.mean()
        slot = last._sky.slot  # type: ignore[attr-defined]
        assert first.item() == 3.0 * (step + 1)
        if step > STEPS and step % 3 == 0:
            came = slot in companions._came
            del last
            others = [x.sum() - number for number in range(8)]
            for number, other in enumerate(others):
                if other._sky.slot == slot:  # type: ignore[attr-defined]
                    replaced += came
                    assert other.item() == 3.0 * (step + 1) - number
        else:
            assert last.item() == step + 1
    assert replaced


def test_a_failed_number_raises_where_it_is_asked_for(sky: str) -> None:
    x = torch.ones(4, device=sky)
    index = torch.tensor([0, 1], device=sky)
    for step in range(STEPS):
        first, last = x.sum(), x[index * (50 if step == STEPS - 1 else 1)].sum()
        assert first.item() == 4
        if step == STEPS - 1:
            with pytest.raises(IndexError):
                last.item()
        else:
            assert last.item() == 2


def test_a_number_that_is_never_asked_for_again_stops_coming(sky: str) -> None:
    x = torch.zeros(3, device=sky)
    streams: list[object] = []
    for step in range(60):
        x = x + 1
        first, last = x.sum(), x.mean()
        assert first.item() == 3.0 * (step + 1)
        if step >= 40:
            streams.append(first._sky.device.recorder.last_batch.stream)  # type: ignore[attr-defined]
        if step < STEPS:
            assert last.item() == step + 1
    # Now and then another thread has sent a batch since then, of what is to be released.
    asking = [stream for stream in streams if "item" in stream or "numbers" in stream]  # type: ignore[operator]
    assert asking
    assert not any("numbers" in stream for stream in asking)  # type: ignore[operator]


# --- programs --------------------------------------------------------------------------------------------------------

Pair = tuple[torch.Tensor, torch.Tensor]


def _step(draw: random.Random, length: int) -> list[tuple[int, int, int, float]]:
    """Choose what a step does, so that each step can do the same."""
    return [(draw.randrange(15), draw.randrange(6), draw.randrange(6), draw.random()) for _ in range(length)]


def _run_step(
    step: list[tuple[int, int, int, float]], pairs: list[Pair], draw: random.Random, sky: str, odd: float
) -> None:
    for what, a, b, chance in step:
        if draw.random() < odd:  # most steps are alike, and some are not
            what, a, b = draw.randrange(15), draw.randrange(6), draw.randrange(6)
        (ours, theirs), (mine, other) = pairs[a], pairs[b]
        if what < 6:
            assert ours.item() == theirs.item()
        elif what == 6:
            pairs[b] = (ours + 1) % 50, (theirs + 1) % 50
        elif what == 7:
            pairs[b] = (ours * mine + 1) % 50, (theirs * other + 1) % 50
        elif what == 8:
            pairs[b] = ours.detach(), theirs.detach()
        elif what == 9:
            pairs[b] = ours.view(()), theirs.view(())
        elif what == 10:
            ours.add_(1).remainder_(50)
            theirs.add_(1).remainder_(50)
        elif what == 11:
            (ours.view(1)[0]).fill_(chance)
            (theirs.view(1)[0]).fill_(chance)
        elif what == 12:
            assert torch.equal(ours.cpu(), theirs)
        elif what == 13:
            value = torch.tensor(float(int(chance * 10)))  # uploads take slots, too
            pairs[b] = value.to(sky), value
        else:
            whole = torch.stack([ours, mine, ours])
            twin = torch.stack([theirs, other, theirs])
            pairs[a], pairs[b] = (whole[0], twin[0]), (whole[2], twin[2])


def _program(seed: int, sky: str, steps: int) -> None:
    draw = random.Random(seed)
    step = _step(draw, draw.randrange(4, 14))
    odd = draw.choice([0.0, 0.0, 0.03, 0.15])
    twin = torch.arange(5.0)
    ours = twin.to(sky)
    pairs: list[Pair] = []
    for _ in range(steps):
        ours, twin = (ours + 1) % 7, (twin + 1) % 7
        fresh = [((ours * number).sum(), (twin * number).sum()) for number in range(1, 7)]
        pairs[draw.randrange(3) if draw.random() < odd else 0 :] = fresh if not pairs else fresh[: len(pairs)]
        del pairs[6:]
        _run_step(step, pairs, draw, sky, odd)
        if draw.random() < 0.05:
            gc.collect()
    for mine, other in pairs:
        assert torch.equal(mine.cpu(), other), seed


@pytest.mark.parametrize("seed", range(6))
def test_programs_that_repeat_read_the_numbers_of_the_cpu(seed: int, sky: str) -> None:
    _program(seed, sky, 25)


def test_programs_have_numbers_that_came_along(sky: str, taken: list[object]) -> None:
    for seed in range(20, 23):
        _program(seed, sky, 25)
    assert len(taken) > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
def test_more_programs(seed: int, sky: str) -> None:
    for part in range(15):
        _program(seed * 1000 + part, sky, 60)


def test_threads_that_ask_while_others_write_get_the_numbers_of_now(sky: str) -> None:
    shared, lock, written = torch.zeros((), device=sky), threading.Lock(), [0]
    wrong: list[object] = []

    def ask_of_own(begin: int) -> None:
        for i in range(begin, begin + 60):
            x = torch.full((3,), float(i), device=sky)
            total, most, mean = x.sum(), x.max(), (x * 2).mean()
            found = [total.item(), most.item(), mean.item()]
            x.mul_(2)
            total.add_(1)
            found += [x.sum().item(), total.item()]
            if found != [3.0 * i, i, 2.0 * i, 6.0 * i, 3.0 * i + 1]:
                wrong.append((i, found))

    def ask_of_shared(rounds: int) -> None:
        for _ in range(rounds):
            with lock:
                shared.add_(1)
                written[0] += 1
                double, more = shared * 2, shared + 1
                found = [shared.item(), double.item(), more.item()]
                if found != [written[0], 2 * written[0], written[0] + 1]:
                    wrong.append((written[0], found))

    asks: list[tuple[Any, int]] = [(ask_of_own, 1), (ask_of_own, 100), (ask_of_shared, 200), (ask_of_shared, 200)]
    threads = [threading.Thread(target=ask, args=(number,)) for ask, number in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
