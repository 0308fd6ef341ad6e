"""Data-parallel training on a pool: one model, several ranks, gradients averaged after every step.

    python examples/ddp.py --nodes 2 --epochs 5

The nodes are processes of this machine, and the data scikit-learn's packaged digits: nothing is fetched. For real
machines, exchange the provider: everything else stays.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

import skyproxy as sky


@sky.compute
@sky.stdout(only="head")
def train(images: torch.Tensor, labels: torch.Tensor, epochs: int) -> dict[str, float]:
    """Runs on every rank; what it returns comes back once for each."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data) if dist.is_initialized() else None
    loader = DataLoader(data, batch_size=64, sampler=sampler, shuffle=sampler is None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        sums = torch.zeros(3, device=device)  # loss, right answers, all answers
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            scores = model(x)
            loss = nn.functional.cross_entropy(scores, y)
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach() * len(y), (scores.argmax(1) == y).sum(), torch.tensor(len(y))])
        if dist.is_initialized():
            dist.all_reduce(sums)
        print(f"epoch {epoch + 1}: loss {sums[0] / sums[2]:.4f}, accuracy {sums[1] / sums[2]:.1%}")
    return {"rank": sky.instance_info().rank, "accuracy": (sums[1] / sums[2]).item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    with sky.Compute(provider=sky.Local(), nodes=arguments.nodes, plugins=[sky.plugins.torch()]) as pool:
        for result in train(images, labels, arguments.epochs) @ pool:
            print(f"rank {result['rank']}: accuracy {result['accuracy']:.1%}")


if __name__ == "__main__":
    main()
