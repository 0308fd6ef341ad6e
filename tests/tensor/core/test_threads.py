"""Several threads record at once: each gets its own results, gradients and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from skyproxy.session.requests import WAIT_OBSERVERS


def together(bodies: list[Callable[[], None]]) -> None:
    """Runs each body on a thread of its own, all from the same moment on; raises the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        try:
            start.wait(30)
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_threads_get_their_own_values(sky: str, sky1: str) -> None:
    def body(number: int, device: str) -> Callable[[], None]:
        def run() -> None:
            x = torch.full((4,), float(number), device=device)
            total = torch.zeros(4, device=device)
            for i in range(200):
                total += x * i
                if i % 50 == 0:
                    assert x[1].item() == number
            assert total.tolist() == [number * 19900.0] * 4

        return run

    together([body(i, (sky, sky1)[i % 2]) for i in range(6)])


def test_backward_runs_on_several_devices_and_threads_at_once(sky: str, sky1: str) -> None:
    def body(device: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(30):
                x = torch.ones(3, device=device, requires_grad=True)
                y = (x * 2).to(sky)
                (y * 3).sum().backward()
                assert x.grad is not None
                assert x.grad.device == torch.device(device)
                assert x.grad.tolist() == [6, 6, 6]

        return run

    together([body((sky, sky1)[i % 2]) for i in range(4)])


def test_threads_train_models_of_their_own(sky1: str) -> None:
    losses: dict[int, list[float]] = {}

    def body(number: int) -> Callable[[], None]:
        def run() -> None:
            x = torch.linspace(0, 1, 12).view(4, 3).to(sky1)
            module = nn.Linear(3, 2).to(sky1)
            with torch.no_grad():
                module.weight.fill_(0.1 * number)
                module.bias.zero_()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            losses[number] = []
            for _ in range(5):
                optimizer.zero_grad()
                loss = module(x).square().sum()
                loss.backward()
                optimizer.step()
                losses[number].append(loss.item())

        return run

    together([body(1), body(2), body(3), body(1 + 3)])
    parallel = dict(losses)
    for number in parallel:
        body(number)()
        assert losses[number] == parallel[number]


def test_one_tensor_can_be_read_by_all(sky1: str) -> None:
    shared = torch.arange(1000.0, device=sky1)

    def run() -> None:
        for _ in range(20):
            assert (shared * 2).sum().item() == 999000.0

    together([run] * 4)


def test_an_error_stays_with_its_thread(sky1: str) -> None:
    def good() -> None:
        for _ in range(30):
            assert torch.ones(2, 2, device=sky1).sum().item() == 4

    def bad() -> None:
        for _ in range(5):
            with pytest.raises(torch.linalg.LinAlgError):
                torch.linalg.inv(torch.zeros(2, 2, device=sky1)).tolist()

    together([good, bad, good, bad])


def test_tensors_may_die_on_any_thread(sky1: str) -> None:
    tensors = [torch.full((10,), float(i), device=sky1) for i in range(400)]

    def kill() -> None:
        while True:
            try:
                tensor = tensors.pop()
            except IndexError:
                return
            del tensor

    def make() -> None:
        for i in range(200):
            x = torch.full((3,), float(i), device=sky1)
            assert i % 20 or (x + x).tolist() == [2.0 * i] * 3

    together([kill, make, kill, make])


def test_printing_copying_and_saving_work_on_threads(sky1: str) -> None:
    import copy
    import io

    def run() -> None:
        module = nn.Linear(3, 3).to(sky1)
        for _ in range(5):
            assert "device='sky:1'" in repr(module.weight)
            twin = copy.deepcopy(module)
            file = io.BytesIO()
            torch.save(twin.state_dict(), file)
            file.seek(0)
            assert torch.equal(torch.load(file, map_location="cpu")["weight"], module.weight.detach().cpu())

    together([run] * 3)


def on_a_thread(action: Callable[[], object]) -> None:
    together([lambda: (action(), None)[1]])


ASKED: dict[str, tuple[Callable[[str], torch.Tensor], Callable[[torch.Tensor], float]]] = {
    "a number": (lambda sky: torch.ones(3, device=sky).sum(), lambda x: x.item()),
    "an element": (lambda sky: torch.ones(3, device=sky).cumsum(0), lambda x: x[1].item()),
    "a list": (lambda sky: torch.ones(3, device=sky).cumsum(0), lambda x: x.tolist()[1]),
    "an element of many": (lambda sky: torch.ones(9999, device=sky).cumsum(0), lambda x: [n.item() for n in x[:9]][8]),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_another_threads_graph_writes_during_a_wait_is_seen_after_it(asked: str, sky: str) -> None:
    make, ask = ASKED[asked]
    x = make(sky)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        x.fill_(7)
    todo = [graph.replay]

    def write_once(purpose: str) -> None:
        while todo:
            on_a_thread(todo.pop())

    WAIT_OBSERVERS.append(write_once)
    try:
        ask(x)
    finally:
        WAIT_OBSERVERS.remove(write_once)
    assert not todo
    assert ask(x) == 7
    assert (x.clone().cpu() == 7).all()


def test_what_another_threads_compiled_code_writes_during_a_capture_is_seen_after_it(sky: str) -> None:
    add = torch.compile(lambda *tensors: [tensor.add_(10) for tensor in tensors])
    uploaded, number = torch.tensor([1.0, 2.0], device=sky), torch.tensor(3.0, device=sky)
    computed, static = torch.ones(3, device=sky).cumsum(0), torch.zeros(2, device=sky)
    assert [uploaded[0].item(), number.item(), computed[1].item()] == [1, 3, 2]
    with torch.sky.graph(torch.sky.SkyGraph()):
        static.add_(1)
        on_a_thread(lambda: add(uploaded, number, computed))
    assert [uploaded[0].item(), number.item(), computed[1].item()] == [11, 13, 12]
