"""Trains on a worker that this very function asks for: it comes up, is handed in as `node`, and goes at the end.

    python examples/compute_mnist.py --epochs 5
    python examples/compute_mnist.py --mnist --gpus 1      # MNIST itself, through torchvision, on a GPU

Where the worker runs: SKYPROXY_PROVIDER or the saved context says so (a cluster, say); otherwise on this machine. The
data are scikit-learn's packaged digits unless you ask for MNIST, which torchvision downloads once.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import skyproxy as sky


class Net(nn.Module):
    """Two convolutions and two linear layers: (N, 1, side, side) images to (N, 10) scores."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.scores = nn.Sequential(nn.Flatten(), nn.Linear(64 * (side // 2) ** 2, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scores(self.features(images))


def datasets(mnist: bool) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Training and test images, and the length of their sides."""
    if mnist:
        from torchvision import datasets, transforms

        return *(datasets.MNIST("data", part, transforms.ToTensor(), download=True) for part in (True, False)), 28
    from train_digits import load_data

    return *load_data(), 8


async def train(node: sky.Node, epochs: int = 5, mnist: bool = False, batch_size: int = 128) -> float:
    """Trains on the node's first device, with the data loader here; the accuracy on images that it has not seen."""
    device = node.devices[0]
    torch.manual_seed(0)
    training, test, side = datasets(mnist)
    model = Net(side).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        total = torch.zeros((), device=device)
        for images, labels in DataLoader(training, batch_size=batch_size, shuffle=True):
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch + 1}: loss {await total.item_async() / len(training) * batch_size:.4f}")
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=1000):
            right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    return await right.item_async() / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--mnist", action="store_true", help="MNIST instead of the packaged digits")
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs the worker asks for")
    options = parser.parse_args()
    resources = {"cpu": "1", "memory": "4Gi", **({"nvidia.com/gpu": str(options.gpus)} if options.gpus else {})}
    run = sky.compute(name="mnist", resources=resources)(train)
    print(f"test accuracy {asyncio.run(run(epochs=options.epochs, mnist=options.mnist)):.2%}")


if __name__ == "__main__":
    main()
