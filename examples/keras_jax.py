"""Keras 3 on JAX, data-parallel over the ranks of a pool. Needs keras and jax on the workers only.

python examples/keras_jax.py --nodes 2 --epochs 5
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import skyproxy as sky


@sky.compute
@sky.stdout(only="head")
def train(pixels: np.ndarray, labels: np.ndarray, epochs: int) -> dict[str, float]:
    """Runs on every rank: each has its share of the data, and one model over all of them."""
    import jax
    import keras

    info = sky.instance_info()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = sky.shard(pixels, labels, shuffle=True, seed=0, drop_last=True)
    history = model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)
    print(f"{jax.process_count()} processes, accuracy {history.history['accuracy'][-1]:.1%}")
    return {"rank": info.rank, "accuracy": float(history.history["accuracy"][-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    plugins = [sky.plugins.jax(), sky.plugins.keras(backend="jax")]
    with sky.Compute(provider=sky.Local(), nodes=arguments.nodes, plugins=plugins) as pool:
        for result in train(pixels.astype("float32") / 16, labels, arguments.epochs) @ pool:
            print(f"rank {result['rank']}: accuracy {result['accuracy']:.1%}")


if __name__ == "__main__":
    main()
