"""joblib and scikit-learn over a pool, Keras on torch, and a plugin of one's own; two ranks without a process group."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import joblib
import pytest
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.svm import SVC

import skyproxy as sky
from skyproxy.errors import ConfigurationError

pytestmark = pytest.mark.timeout(300)


class Marking(sky.plugins.Plugin):
    """A user's plugin: a variable in every rank, a mark on every result of `marked`."""

    def __init__(self) -> None:
        self.client: list[str] = []

    @contextlib.contextmanager
    def around_process(self, info: sky.InstanceInfo) -> Iterator[None]:
        os.environ["MARK"] = f"rank {info.rank}"
        yield

    def decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import functools

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return f"{os.environ['MARK']}: {result}" if function.__name__ == "marked" else result

        return wrapper

    @contextlib.contextmanager
    def around_client(self, pool: Any) -> Iterator[None]:
        os.environ["SKY_TEST_CLIENT"] = str(pool.world_size)
        yield
        del os.environ["SKY_TEST_CLIENT"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    plugins = [sky.plugins.keras(backend="torch"), sky.plugins.sklearn(), Marking()]
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2, plugins=plugins) as opened:
        yield opened
    assert "SKY_TEST_CLIENT" not in os.environ


@sky.compute
def marked(value: int) -> int:
    return value


def test_a_plugin_of_ones_own_is_called_on_both_sides(pool: Any) -> None:
    assert marked(7) @ pool == ["rank 0: 7", "rank 1: 7"]
    assert os.environ["SKY_TEST_CLIENT"] == "2"


def where(number: int) -> tuple[int, int]:
    time.sleep(0.01)
    return number, os.getpid()


def test_parallel_runs_on_the_ranks_by_default(pool: Any) -> None:
    results = joblib.Parallel()(joblib.delayed(where)(number) for number in range(40))
    assert [number for number, _ in results] == list(range(40))
    processes = {process for _, process in results}
    assert os.getpid() not in processes
    assert len(processes) == 2


def test_a_pool_can_be_chosen_in_place(pool: Any) -> None:
    with joblib.parallel_config("sky", pool=pool, n_jobs=1):
        assert joblib.Parallel()(joblib.delayed(abs)(-number) for number in range(3)) == [0, 1, 2]
    generator = joblib.Parallel(return_as="generator")(joblib.delayed(abs)(-number) for number in range(5))
    assert list(generator) == [0, 1, 2, 3, 4]


def test_the_older_way_to_choose_a_backend_works_too(pool: Any) -> None:
    sky.plugins.joblib.register()
    with joblib.parallel_backend("sky", pool=pool):
        assert joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(-number) for number in range(4)) == [0, 1, 2, 3]


def fail(number: int) -> int:
    if number == 3:
        raise LookupError(f"number {number}")
    return number


def test_an_exception_in_a_batch_is_raised_as_it_was(pool: Any) -> None:
    with pytest.raises(LookupError, match="number 3"):
        joblib.Parallel()(joblib.delayed(fail)(number) for number in range(8))
    assert joblib.Parallel()(joblib.delayed(fail)(number) for number in range(3)) == [0, 1, 2]


def test_the_backend_wants_a_pool() -> None:
    from skyproxy.plugins.joblib_backend import SkyBackend

    with pytest.raises(ConfigurationError, match="needs a pool"):
        SkyBackend()


def test_scikit_learn_searches_on_the_pool(pool: Any) -> None:
    x, y = load_iris(return_X_y=True)
    grid = {"C": [0.1, 1.0], "gamma": [0.1, 1.0]}
    remote = GridSearchCV(SVC(), grid, cv=3).fit(x, y)
    with joblib.parallel_config("sequential"):
        local = GridSearchCV(SVC(), grid, cv=3).fit(x, y)
        scores = cross_val_score(SVC(), x, y, cv=3)
    assert remote.best_params_ == local.best_params_
    assert remote.cv_results_["mean_test_score"].tolist() == local.cv_results_["mean_test_score"].tolist()
    assert remote.predict(x).tolist() == local.predict(x).tolist()
    assert cross_val_score(SVC(), x, y, cv=3).tolist() == scores.tolist()


@sky.compute
def keras_on_torch() -> tuple[str, str, float, float]:
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    x = np.linspace(-1, 1, 32, dtype="float32")[:, None]
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    losses = model.fit(x, 2 * x, epochs=3, verbose=0).history["loss"]
    return keras.backend.backend(), type(model.weights[0].value).__module__, losses[0], losses[-1]


@pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed")
def test_keras_runs_on_torch(pool: Any) -> None:
    backend, module, first, last = keras_on_torch() >> pool
    assert backend == "torch"
    assert module.startswith("torch")
    assert last < first
