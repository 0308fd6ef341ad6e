"""JAX and Keras on two ranks: one mesh over two processes, Keras on a backend that is not its default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import skyproxy as sky

# Found, not imported: Keras on its default backend would not load here.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (find_spec("jax") and find_spec("keras")), reason="jax or keras is not installed"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    plugins = [sky.plugins.keras(backend="jax"), sky.plugins.jax()]
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2, plugins=plugins) as opened:
        yield opened


@sky.compute
def mesh() -> dict[str, Any]:
    import jax
    from jax.experimental import multihost_utils

    mine = np.array([10.0 * (jax.process_index() + 1)])
    return {
        "index": jax.process_index(),
        "count": jax.process_count(),
        "devices": jax.device_count(),
        "gathered": np.asarray(multihost_utils.process_allgather(mine)).ravel().tolist(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith("JAX_")},
        "info": sky.instance_info(),
    }


def test_jax_sees_the_devices_of_both_processes(pool: Any) -> None:
    results = mesh() @ pool
    assert [result["index"] for result in results] == [0, 1]
    assert {result["count"] for result in results} == {2}
    assert {result["devices"] for result in results} == {2}
    assert [result["gathered"] for result in results] == [[10.0, 20.0]] * 2
    variables = results[1]["variables"]
    assert variables["JAX_NUM_PROCESSES"] == "2"
    assert variables["JAX_PROCESS_ID"] == "1"
    assert variables["JAX_LOCAL_DEVICE_COUNT"] == "1"
    assert variables["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
    assert variables["JAX_COORDINATOR_ADDRESS"] != f"127.0.0.1:{results[1]['info'].head_port}"  # torch's port


@sky.compute
def fit(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    mine_x, mine_y = sky.shard(x, y)
    history = model.fit(mine_x, mine_y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return {
        "backend": keras.backend.backend(),
        "distribution": type(keras.distribution.distribution()).__name__,
        "losses": history.history["loss"],
        "weights": [np.asarray(weight) for weight in model.get_weights()],
    }


def test_keras_trains_data_parallel_on_jax(pool: Any) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(64, 4)).astype("float32")
    # Keras's default is tensorflow, which is not here: had the plugin come too late, the import itself would fail.
    assert find_spec("tensorflow") is None
    results = fit(x, x.sum(1, keepdims=True)) @ pool
    assert {result["backend"] for result in results} == {"jax"}
    assert {result["distribution"] for result in results} == {"DataParallel"}
    assert results[0]["losses"][-1] < results[0]["losses"][0]
    for mine, theirs in zip(results[0]["weights"], results[1]["weights"], strict=True):
        np.testing.assert_array_equal(mine, theirs)  # one model: gradients of both shards
