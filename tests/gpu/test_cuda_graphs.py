"""Captured graphs on a CUDA worker: real CUDA graphs, with the results of the same commands run one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy_server.cuda_graphs import WARM_UPS


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    node = skyproxy.launch_local("cuda")
    yield str(node.device("cuda"))
    node.close()


def step_on(device: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True, foreach=True)
    return model, optimizer, torch.ones(16, 32, device=device), torch.zeros(16, 8, device=device)


def test_replays_become_cuda_graphs_and_train_as_local_cuda_does(device: str) -> None:
    results = []
    for place in (device, "cuda"):
        model, optimizer, x, y = step_on(place)

        def step(model=model, optimizer=optimizer, x=x, y=y) -> torch.Tensor:  # type: ignore[no-untyped-def]
            optimizer.zero_grad(set_to_none=True)
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(3):
            step()
        if place != "cuda":
            graph = torch.sky.SkyGraph()
            with torch.sky.graph(graph):
                loss = step()
        torch.manual_seed(1)
        losses = []
        for i in range(WARM_UPS + 5):
            x.copy_(torch.full((16, 32), float(i)))
            if place == "cuda":
                loss = step()
            else:
                graph.replay()
            losses.append(loss.detach().cpu().clone())
        results.append(losses)
        if place != "cuda":
            assert torch.sky.graph_report(device)["cuda_graphs"] == 1
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_views_of_results_see_launches(device: str) -> None:
    x = torch.zeros(4, device=device)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        y = x + 1
    graph.replay()
    view = y[1:]
    for i in range(WARM_UPS + 4):
        x.fill_(i)
        graph.replay()
        assert view.tolist() == [i + 1] * 3


def test_random_numbers_go_on_through_the_capture(device: str) -> None:
    x = torch.zeros(8, device=device)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        y = torch.rand_like(x)
    rows = set()
    for _ in range(WARM_UPS + 5):
        graph.replay()
        rows.add(tuple(y.tolist()))
    assert len(rows) == WARM_UPS + 5


def test_what_cuda_cannot_capture_stays_a_list(device: str) -> None:
    x = torch.ones(8, device=device)
    table = torch.arange(8.0, device=device)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        y = torch.linalg.eigvalsh(torch.diag(x * table))  # asks the GPU for its status
    for i in range(WARM_UPS + 4):
        x.fill_(i)
        graph.replay()
        torch.testing.assert_close(y.cpu(), torch.arange(8.0) * i)


def test_two_graphs_feed_each_other(device: str) -> None:
    x = torch.ones(4, device=device)
    first, second = torch.sky.SkyGraph(), torch.sky.SkyGraph()
    with torch.sky.graph(first):
        y = x * 2
    with torch.sky.graph(second):
        z = y + 1
    for i in range(WARM_UPS + 5):
        x.fill_(i)
        first.replay()
        second.replay()
        assert z.tolist() == [2 * i + 1] * 4


def test_compiled_graphs_run_on_the_gpu(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    want = model(x)
    remote = model.to(device)
    for mode in ("eager", "auto"):
        fast = torch.compile(remote, backend="sky", options={"worker": mode})
        torch.testing.assert_close(fast(x.to(device)).cpu(), want, rtol=1e-3, atol=1e-4)
        torch._dynamo.reset()
