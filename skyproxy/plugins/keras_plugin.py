"""Keras 3 on a pool: its backend chosen before anybody imports it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from skyproxy.errors import ConfigurationError
from skyproxy.plugins.requirements import requirement, with_requirements
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.lifecycle import environment
from skyproxy.runtime.plugin import Plugin

if TYPE_CHECKING:
    from skyproxy.pools.specification import PlannedPool
    from skyproxy.providers.image import Image

_BACKENDS = ("jax", "torch", "tensorflow", "openvino", "numpy")


@dataclass(frozen=True)
class KerasPlugin(Plugin):
    """`sky.plugins.keras(backend="jax")`: Keras is installed, and runs on that backend in every rank.

    With the backend jax and more than one device in all ranks together, the data are distributed over them
    (`keras.distribution.DataParallel`). Other backends distribute as their frameworks do: add `sky.plugins.torch()`.

    Attributes:
        backend: "jax", "torch", "tensorflow", "openvino" or "numpy".
        version: of keras: "latest", "3.5.0", or a constraint.
        distribute: whether jax's data parallelism is switched on.

    Example:
        ```python
        plugins = [skyproxy.plugins.jax(), skyproxy.plugins.keras(backend="jax")]
        pool = skyproxy.Compute(provider=skyproxy.Local(), nodes=2, plugins=plugins)
        ```
    """

    backend: Literal["jax", "torch", "tensorflow", "openvino", "numpy"] = "jax"
    version: str = "latest"
    distribute: bool = True

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ConfigurationError(f"backend={self.backend!r} is not one of Keras's: {', '.join(_BACKENDS)}.")
        requirement("keras", self.version)

    @property
    def name(self) -> str:
        return "keras"

    def transform(self, image: Image, cluster: PlannedPool) -> Image:
        """Adds keras; the backend's own plugin brings the backend, with the right wheels."""
        return with_requirements(image, [requirement("keras", self.version)])

    def around_process(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """KERAS_BACKEND, which Keras reads when it is imported and never again."""
        keras = sys.modules.get("keras")
        if keras is not None and hasattr(keras, "backend") and keras.backend.backend() != self.backend:
            raise ConfigurationError(
                f"Keras is already loaded in this worker, on {keras.backend.backend()}. Use a pool with "
                "workers of its own."
            )
        return environment({"KERAS_BACKEND": self.backend})

    def decorate(self, function: Callable[..., object]) -> Callable[..., object]:
        """Data parallelism over all devices of all ranks, for jax; per task, for Keras keeps it per thread."""
        if self.backend != "jax" or not self.distribute:
            return function
        import jax

        if jax.device_count() < 2:
            return function

        @functools.wraps(function)
        def distributed(*args: object, **kwargs: object) -> object:
            import keras

            # Each rank feeds its own share of the data (`sky.shard`), so Keras must not take a share of that share.
            parallel = keras.distribution.DataParallel(
                devices=keras.distribution.list_devices(), auto_shard_dataset=False
            )
            with parallel.scope():
                return function(*args, **kwargs)

        return distributed
