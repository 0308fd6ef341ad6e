"""Values that are known here cost no wait, and whatever may have changed one makes it unknown."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.tensor.core.known_values import KnownMeta
from skyproxy.tensor.dispatch import hot_path


def trips() -> int:
    return int(torch.sky.stats()["round_trips"])


def free(ask: Callable[[], Any]) -> Any:
    """What `ask` gives, which must not wait."""
    before = trips()
    result = ask()
    assert trips() == before
    return result


def loaded(tensors: Any, sky: str) -> Any:
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return torch.load(file, map_location=sky)


def asked(sky: str) -> torch.Tensor:
    tensor = torch.arange(4.0, device=sky).sum() - 3.0
    assert tensor.item() == 3.0
    return tensor


SOURCES: dict[str, Callable[[str], torch.Tensor]] = {
    "uploaded": lambda sky: torch.tensor(3.0).to(sky),
    "made there": lambda sky: torch.full((), 3.0, device=sky),
    "loaded": lambda sky: loaded(torch.tensor(3.0), sky),
    "asked for": asked,
    "copied": lambda sky: copy.deepcopy(torch.tensor(3.0).to(sky)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_number_that_was_sent_or_asked_for_needs_no_wait(source: str, sky: str) -> None:
    tensor = SOURCES[source](sky)
    assert free(tensor.item) == 3.0
    assert free(lambda: float(tensor.detach())) == 3.0
    assert free(lambda: bool(tensor))


def test_a_number_of_a_file_may_lie_among_others(sky: str) -> None:
    assert [loaded(torch.tensor([3, 4])[place], sky).item() for place in (0, 1)] == [3, 4]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_counter_that_is_read_each_time_never_waits(dtype: torch.dtype, source: str, sky: str) -> None:
    counter, twin = SOURCES[source](sky).to(dtype), torch.tensor(3.0, dtype=dtype)
    counter.item()
    other, other_twin = torch.zeros((), dtype=dtype, device=sky), torch.zeros((), dtype=dtype)
    for _ in range(40):
        for t, extra in ((counter, other), (twin, other_twin)):
            t += 1
            t.mul_(1.01)
            torch._foreach_add_([t, extra], 0.1)
            extra.copy_(t)
        assert free(counter.item) == twin.item()
        assert free(other.item) == other_twin.item()
    assert torch.equal(counter.clone().expand(2).cpu(), twin.expand(2))  # what the worker holds


def test_counters_of_integers_and_in_inference_mode(sky: str) -> None:
    counter = torch.zeros((), dtype=torch.int64, device=sky)
    with torch.inference_mode():
        counter += 2
        inner = torch.zeros((), device=sky)
        inner += 1.5
    counter += 1
    assert free(counter.item) == 3
    assert type(counter.item()) is int
    assert free(inner.item) == 1.5
    assert free(torch.tensor(True).to(sky).item) is True


def test_what_is_computed_of_known_numbers_is_known(sky: str) -> None:
    rate = torch.tensor(1e-3).to(sky)
    for _ in range(50):
        assert free((-(rate / 0.9)).item) == (-(torch.tensor(1e-3) / 0.9)).item()
        assert free((1 + rate * 3).item) == (1 + torch.tensor(1e-3) * 3).item()


def test_a_counter_that_nobody_reads_takes_the_short_way_again(sky: str) -> None:
    counter = torch.zeros((), device=sky)
    for _ in range(10):
        counter += 1
    assert not isinstance(counter._sky.meta, KnownMeta)
    assert counter.item() == 10.0


def _through_data(t: torch.Tensor) -> None:
    t.data.fill_(7.0)


def _through_a_view(t: torch.Tensor) -> None:
    t.view(1)[0] = 7.0


def _through_an_expanded_view(t: torch.Tensor) -> None:
    t.unsqueeze(0).copy_(torch.tensor([7.0]))


def _through_a_detached_tensor(t: torch.Tensor) -> None:
    t.detach().fill_(7.0)


def _through_its_storage(t: torch.Tensor) -> None:
    t.untyped_storage().copy_(torch.tensor(7.0).untyped_storage())


def _through_another_tensor_on_its_storage(t: torch.Tensor) -> None:
    torch.empty(0, device=t.device).set_(t.untyped_storage(), 0, (1,)).fill_(7.0)


def _by_out(t: torch.Tensor) -> None:
    torch.add(torch.tensor(3.0, device=t.device), torch.ones((), device=t.device), alpha=4, out=t)


def _by_a_list(t: torch.Tensor) -> None:
    torch._foreach_add_([t], [torch.ones(2, 2, device=t.device).sum()])


def _by_an_unknown_operand(t: torch.Tensor) -> None:
    t.add_(torch.ones(2, 2, device=t.device).sum())


def _by_an_operation_of_its_own(t: torch.Tensor) -> None:
    t.exp_().zero_().add_(7.0)


def _by_new_data(t: torch.Tensor) -> None:
    t.data = torch.tensor(7.0).to(t.device)


def _by_set(t: torch.Tensor) -> None:
    t.set_(torch.full((1,), 7.0, device=t.device).untyped_storage(), 0, ())


def _by_a_mask(t: torch.Tensor) -> None:
    t.masked_fill_(torch.tensor(True).to(t.device), 7.0)


def _by_an_index(t: torch.Tensor) -> None:
    t[...] = 7.0


def _by_a_random_draw(t: torch.Tensor) -> None:
    t.uniform_(7.0, 7.0)


def _by_running_statistics(t: torch.Tensor) -> None:
    x = torch.full((4, 1), 7.0, device=t.device)
    torch.nn.functional.batch_norm(x, t.view(1), torch.ones(1, device=t.device), training=True, momentum=1.0)


def _in_a_function(t: torch.Tensor) -> None:
    node = next(node for node in skyproxy.list_nodes() if node.alive)
    node.run(_fill, t)


def _fill(t: torch.Tensor) -> None:
    t.fill_(7.0)


def _in_a_compiled_graph(t: torch.Tensor) -> None:
    torch.compile(lambda x: x.add_(4.0), backend="sky")(t)


def _in_a_graph(t: torch.Tensor) -> None:
    t.mul_(1.0)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        t.add_(2.0)
    graph.replay()
    assert t.item() == 5.0
    graph.replay()


def _under_vmap(t: torch.Tensor) -> None:
    torch.vmap(lambda x: x.add_(4.0))(t.unsqueeze(0))


WRITES = {f.__name__.removeprefix("_").replace("_", " "): f for name, f in list(globals().items()) if name.startswith(
    ("_through", "_by", "_in_a", "_under")
)}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("write", WRITES)
def test_what_changes_a_number_is_noticed(write: str, source: str, sky: str) -> None:
    tensor = SOURCES[source](sky)
    free(tensor.item)
    with torch.no_grad():
        WRITES[write](tensor)
    assert tensor.item() == pytest.approx(7.0)
    assert tensor.cpu().item() == pytest.approx(7.0)
    tensor += 1
    assert tensor.item() == pytest.approx(8.0)


def test_views_that_were_made_before_are_noticed(sky: str) -> None:
    tensor = torch.ones(4, device=sky).sum()
    view = tensor.view(1)
    assert tensor.item() == 4.0
    view += 1
    assert tensor.item() == 5.0
    with torch.no_grad():
        element = torch.ones(3, device=sky)[1]
        assert element.item() == 1.0
        element += 1
        assert element.item() == 2.0


def test_tensors_of_one_storage_follow_each_other(sky: str) -> None:
    base = torch.tensor(3.0)
    first, second = loaded([base, base.view(())], sky)
    for number in range(4):
        first += 1
        assert second.item() == 4.0 + 2 * number
        second += 1
        assert first.item() == 5.0 + 2 * number


def test_a_graph_that_was_captured_before_is_noticed(sky: str) -> None:
    total = torch.zeros((), device=sky)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        total += 1
    made: list[torch.Tensor] = []
    other = torch.sky.SkyGraph()
    with torch.sky.graph(other):
        made.append(total * 2)
    for number in range(1, 5):
        graph.replay()
        other.replay()
        assert total.item() == number
        assert made[0].item() == 2 * number


def test_a_function_that_kept_a_tensor_is_noticed(sky: str) -> None:
    node = next(node for node in skyproxy.list_nodes() if node.alive)
    tensor = torch.tensor(3.0).to(f"sky:{skyproxy.list_nodes().index(node)}")

    def keep(t: torch.Tensor) -> None:
        import builtins

        builtins.kept_for_test = t  # type: ignore[attr-defined]

    def change() -> None:
        import builtins

        builtins.kept_for_test.fill_(9.0)  # type: ignore[attr-defined]

    node.run(keep, tensor)
    assert tensor.item() == 3.0
    node.run(change)
    assert tensor.item() == 9.0


def test_threads_that_count_together_lose_nothing(sky: str) -> None:
    counter = torch.zeros((), device=sky)
    lock = threading.Lock()

    def count() -> None:
        for _ in range(50):
            with lock:
                counter.add_(1)
                counter.item()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.item() == 200.0
    assert counter.view(1).cpu().tolist() == [200.0]


def test_a_number_that_failed_is_no_number(sky: str) -> None:
    counter = torch.zeros((), device=sky)
    with pytest.raises(RuntimeError):
        counter.add_(torch.ones(3, device=sky))
    assert counter.item() == 0.0


class Padded(torch.nn.Module):
    """Computes how much to pad from buffers without dimensions, as audio codecs of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stride", torch.tensor(4, dtype=torch.int64), persistent=False)
        self.register_buffer("kernel", torch.tensor(7, dtype=torch.int64), persistent=False)
        self.register_buffer("total", torch.tensor(3, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        frames = (length - self.kernel + self.total) / self.stride + 1
        frames = torch.ceil(frames).to(torch.int64) - 1
        extra = frames * self.stride + self.kernel - self.total - length
        left = self.total // 2
        if extra > left:
            left = torch.maximum(left, extra % 3)
        return torch.nn.functional.pad(x, (int(left), int(extra + self.total - left)))


def test_sizes_computed_of_buffers_need_no_wait(sky: str) -> None:
    module, twin = Padded().to(sky), Padded()
    for length in (*range(20, 60), *range(20, 60)):
        x = torch.arange(float(length)).view(1, 1, -1)
        there = x.to(sky)
        assert torch.equal(free(lambda there=there: module(there)).cpu(), twin(x))


def test_a_number_counted_anew_each_time_keeps_nothing_of_the_ones_before(sky: str) -> None:
    number = torch.zeros((), device=sky)
    for count in range(1, 2000):
        number = number + 1
        assert free(number.item) == count
    depth, sources = 0, number._sky.meta.sources  # type: ignore[attr-defined]
    while sources:
        depth, sources = depth + 1, sources[0].sources
    assert depth < 3


def test_what_only_reads_a_number_takes_the_short_way(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.tensor([True, False]).to(sky)
    number = torch.arange(3.0, device=sky)[1]
    assert number.item() == 1.0  # from now on, the bytes of its storage are known

    def choose() -> torch.Tensor:
        return torch.where(mask, torch.zeros((), device=sky), number)

    assert choose().tolist() == [0.0, 1.0]

    def refuse(*unused: object) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(hot_path, "record", refuse)
    for _ in range(3):
        found = choose()
    monkeypatch.undo()
    assert found.tolist() == [0.0, 1.0]
    assert free(number.item) == 1.0
    number += 1
    assert choose().tolist() == [0.0, 2.0]
