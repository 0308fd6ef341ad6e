"""A model goes to a worker untrained and comes back trained: an object in, an object out.

    python examples/model_round_trip.py --epochs 10

`DigitsClassifier` is defined here, in the program itself, and travels by value; what comes back is an instance of the
same class. The worker needs torch and nothing else, for the data go with the call.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import skyproxy as sky


class DigitsClassifier(nn.Module):
    """Three linear layers: (N, 64) pixels to (N, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU())
        self.scores = nn.Linear(64, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.scores(self.features(pixels))


@sky.function
def train(
    model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor, epochs: int = 10, lr: float = 1e-3
) -> nn.Module:
    """Runs on the worker, and gives the model back with what it learned."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=32, shuffle=True)
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
        print(f"epoch {epoch + 1:2d}: loss {total / len(pixels):.4f}")
    return model


@torch.no_grad()
def accuracy(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of digits that the model names correctly."""
    model.eval()
    return (model(pixels).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train_rows, test_rows = shuffled[:1400], shuffled[1400:]

    model = DigitsClassifier()
    print(f"before: accuracy {accuracy(model, pixels[test_rows], labels[test_rows]):.1%}")
    with sky.Compute(provider=sky.Local()) as compute:
        trained = train(model, pixels[train_rows], labels[train_rows], epochs=arguments.epochs) >> compute
    assert isinstance(trained, DigitsClassifier)
    print(f"after: accuracy {accuracy(trained, pixels[test_rows], labels[test_rows]):.1%}")


if __name__ == "__main__":
    main()
