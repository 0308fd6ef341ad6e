"""Trains a small convolutional network on handwritten digits, on whatever `sky:0` is.

With nothing configured, that is a worker which skyproxy starts on this machine; set SKYPROXY_URL and SKYPROXY_TOKEN
to train on a GPU somewhere else. The data are scikit-learn's 1,797 packaged digits of 8x8 pixels: nothing is fetched.

    python examples/train_digits.py --epochs 12
    python examples/train_digits.py --device cpu      # the same program without skyproxy
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import skyproxy


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers: (N, 1, 8, 8) images to (N, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test digits: images (N, 1, 8, 8) float32 in 0..1, labels (N,) int64."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: str) -> float:
    """The share of digits that the model names correctly."""
    model.eval()
    images, labels = data.tensors
    right = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    return right.item() / len(labels)


def train(device: str, epochs: int, batch_size: int = 64, quiet: bool = False) -> float:
    """Trains a fresh network; the accuracy on digits that it has not seen."""
    torch.manual_seed(0)
    train_data, test_data = load_data()
    loader = DataLoader(train_data, batch_size=batch_size, shuffle=True)
    model = DigitsNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        model.train()
        total = torch.zeros((), device=device)
        for images, labels in tqdm(loader, desc=f"epoch {epoch + 1}/{epochs}", disable=quiet, leave=False):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()  # stays remote: asking for its value here would wait for the worker at every step
        score = accuracy(model, test_data, device)
        if not quiet:
            print(f"epoch {epoch + 1:2d}  loss {total.item() / len(loader):.4f}  test accuracy {score:.2%}")
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="sky:0", help="where the tensors live (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()

    started = time.perf_counter()
    where = torch.zeros(1, device=arguments.device).device
    if where.type == "sky":
        info = skyproxy.devices()[where.index]
        print(f"{info.device}: {info.name} ({info.source})")
    score = train(arguments.device, arguments.epochs)
    print(f"test accuracy {score:.2%} after {time.perf_counter() - started:.1f} s")
    if where.type == "sky":
        stats = torch.sky.stats()
        print(f"{stats['ops']:,} operations in {stats['batches']:,} batches, {stats['round_trips']} round trips")


if __name__ == "__main__":
    main()
