"""Trains a convolutional network on MNIST through `sky:0`. Needs torchvision, which downloads the data once.

pip install torchvision
python examples/mnist.py --epochs 3
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import skyproxy


class MnistNet(nn.Module):
    """Two convolutions, one pooling, two linear layers: (N, 1, 28, 28) images to (N, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3)
        self.second = nn.Conv2d(32, 64, 3)
        self.hidden = nn.Linear(64 * 12 * 12, 128)
        self.scores = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(images))))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        return self.scores(torch.relu(self.hidden(x)))


def load_data(folder: str) -> tuple[DataLoader, DataLoader]:
    """Loaders of MNIST's training and test images, through torchvision."""
    try:
        from torchvision import datasets, transforms
    except ImportError:
        raise SystemExit(
            "torchvision is not installed. Install it, or run examples/train_digits.py, which needs none."
        ) from None
    prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    loaders = [
        DataLoader(
            datasets.MNIST(folder, train=train, download=True, transform=prepare), batch_size=5000, shuffle=train
        )
        for train in (True, False)
    ]
    return loaders[0], loaders[1]


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, device: str) -> torch.Tensor:
    """One pass over the training data; the mean loss, still remote."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in tqdm(loader, leave=False):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(loader)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: str) -> float:
    """The share of images that the model names correctly; waits for the worker once."""
    model.eval()
    right, count = torch.zeros((), dtype=torch.int64, device=device), 0
    for images, labels in loader:
        right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        count += len(labels)
    return right.item() / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="sky:0", help="where the tensors live (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", default="data", help="folder for the data (default: %(default)s)")
    arguments = parser.parse_args()
    train_loader, test_loader = load_data(arguments.data)
    model = MnistNet().to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    for epoch in range(arguments.epochs):
        loss = train_epoch(model, optimizer, train_loader, arguments.device)
        score = evaluate(model, test_loader, arguments.device)
        print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}  test accuracy {score:.2%}")
    print(f"ran on {skyproxy.devices()}" if arguments.device.startswith("sky") else "ran locally")


if __name__ == "__main__":
    main()
