"""Keras 3 on a pool: its backend chosen before anybody imports it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from skyproxy.errors import ConfigurationError
from skyproxy.plugins.requirements import requirement, with_requirements
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.lifecycle import environment
from skyproxy.runtime.plugin import Plugin

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
    """

    backend: Literal["jax", "torch", "tensorflow", "openvino", "numpy"] = "jax"
    version: str = "latest"
    distribute: bool = True

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ConfigurationError(f"backend={self.backend!r} is none of Keras's: {', '.join(_BACKENDS)}.")
        requirement("keras", self.version)

    @property
    def name(self) -> str:
        return "keras"

    def transform(self, image: Any, cluster: Any) -> Any:
        """Adds keras; the backend's own plugin brings the backend, with the right wheels."""
        return with_requirements(image, [requirement("keras", self.version)])

    def around_process(self, info: InstanceInfo) -> contextlib.AbstractContextManager[Any]:
        """KERAS_BACKEND, which Keras reads when it is imported and never again."""
        keras = sys.modules.get("keras")
        if keras is not None and hasattr(keras, "backend") and keras.backend.backend() != self.backend:
            raise ConfigurationError(
                f"Keras is loaded in this worker already, on {keras.backend.backend()}. Use workers of a pool's own."
            )
        return environment({"KERAS_BACKEND": self.backend})

    def around_app(self, info: InstanceInfo) -> contextlib.AbstractContextManager[Any]:
        """Data parallelism over all devices of all ranks, for jax."""
        if self.backend == "jax" and self.distribute:
            return self._data_parallel()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _data_parallel(self) -> Iterator[None]:
        import jax

        if jax.device_count() < 2:
            yield
            return
        import keras

        before = keras.distribution.distribution()
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
        try:
            yield
        finally:
            keras.distribution.set_distribution(before)
