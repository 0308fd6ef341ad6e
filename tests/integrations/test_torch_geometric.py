"""Graph networks of torch_geometric: training, pooling and the library's own functions as on the local CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("torch_geometric")

from torch_geometric import nn, utils
from torch_geometric.data import Batch, Data

_RANDOM = torch.Generator().manual_seed(0)
EDGES = torch.randint(0, 30, (2, 120), generator=_RANDOM)
FEATURES = torch.randn(30, 8, generator=_RANDOM)
LABELS = torch.randint(0, 4, (30,), generator=_RANDOM)
DEGREES = torch.bincount(torch.bincount(EDGES[1], minlength=30))
LAYERS: dict[str, Callable[[], Any]] = {
    "APPNP": lambda: nn.APPNP(3, 0.1),
    "ARMAConv": lambda: nn.ARMAConv(8, 8),
    "ChebConv": lambda: nn.ChebConv(8, 8, 3),
    "EdgeConv": lambda: nn.EdgeConv(torch.nn.Linear(16, 8)),
    "GATConv": lambda: nn.GATConv(8, 4, heads=2),
    "GATv2Conv": lambda: nn.GATv2Conv(8, 4, heads=2),
    "GCNConv": lambda: nn.GCNConv(8, 8),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(8, 8)),
    "GraphConv": lambda: nn.GraphConv(8, 8),
    "PNAConv": lambda: nn.PNAConv(8, 8, ["mean", "max", "std"], ["identity", "amplification"], deg=DEGREES),
    "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(8, 8),
    "SAGEConv": lambda: nn.SAGEConv(8, 8),
    "TAGConv": lambda: nn.TAGConv(8, 8),
    "TransformerConv": lambda: nn.TransformerConv(8, 4, heads=2),
}
FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add_self_loops": lambda edges, x: utils.add_self_loops(edges)[0],
    "coalesce": lambda edges, x: utils.coalesce(edges),
    "degree": lambda edges, x: utils.degree(edges[0], 30),
    "scatter, largest": lambda edges, x: utils.scatter(x[edges[0]], edges[1], 0, 30, "max"),
    "scatter, mean": lambda edges, x: utils.scatter(x[edges[0]], edges[1], 0, 30, "mean"),
    "softmax": lambda edges, x: utils.softmax(x[edges[0]], edges[1]),
    "subgraph": lambda edges, x: utils.subgraph(torch.arange(5, device=edges.device), edges)[0],
    "to_dense_adj": lambda edges, x: utils.to_dense_adj(edges),
    "to_undirected": lambda edges, x: utils.to_undirected(edges),
}


def train(layer: str, device: str) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    first, second = LAYERS[layer]().to(device), torch.nn.Linear(8, 4).to(device)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    x, edges, labels = FEATURES.to(device), EDGES.to(device), LABELS.to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(second(F.relu(first(x, edges))), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in parameters]


@pytest.mark.parametrize("layer", sorted(LAYERS))
def test_training_steps_equal_the_local_ones(layer: str, sky1: str) -> None:
    (ours, our_weights), (theirs, their_weights) = train(layer, sky1), train(layer, "cpu")
    assert ours == theirs
    assert all(torch.equal(a, b) for a, b in zip(our_weights, their_weights, strict=True))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_of_graphs_equal_the_local_ones(name: str, sky1: str) -> None:
    ours, theirs = (FUNCTIONS[name](EDGES.to(device), FEATURES.to(device)) for device in (sky1, "cpu"))
    assert ours.device == torch.device(sky1)
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("pool", [nn.global_add_pool, nn.global_max_pool, nn.global_mean_pool])
def test_batches_of_graphs_move_and_are_pooled(pool: Any, sky1: str) -> None:
    graphs = [Data(x=FEATURES[first : first + 5], edge_index=EDGES[:, first : first + 9] % 5) for first in (0, 5, 10)]
    local, remote = Batch.from_data_list(graphs), Batch.from_data_list(graphs).to(sky1)
    assert remote.x.device == torch.device(sky1)
    assert torch.equal(pool(remote.x, remote.batch).cpu(), pool(local.x, local.batch))


def test_a_graph_u_net_trains_as_it_does_here(sky1: str) -> None:
    """Its pooling turns sorted rows into row pointers, by an operator of PyTorch that workers do not have."""
    found = []
    for device in ("cpu", sky1):
        torch.manual_seed(0)
        net = nn.GraphUNet(8, 8, 4, depth=2).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(FEATURES.to(device), EDGES.to(device)), LABELS.to(device))
            loss.backward()
            optimizer.step()
        found.append([loss, *net.parameters()])
    assert all(torch.equal(ours.cpu(), theirs) for theirs, ours in zip(*found, strict=True))
