"""Lightning on a remote device: import this module, then `Trainer(accelerator="sky")` or `Fabric(accelerator="sky")`.

Lightning asks an accelerator for its devices, but decides by the name "cuda" or "mps" where one of them goes and which
autocast it is: two decisions of its connectors are completed here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from skyproxy import patching
from skyproxy.errors import ConfigurationError
from skyproxy.patching import When
from skyproxy.tensor.core.devices import DEVICES

_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
"""The two distributions of Lightning: each its trainer and its fabric."""
_TESTS = "tests/integrations/test_lightning.py"


class _SkyDevices:
    """Answers for `sky` to what Lightning asks of an accelerator; one device a process."""

    def setup_device(self, device: torch.device) -> None:
        """Makes the device the current one.

        Raises:
            ConfigurationError: it is not a sky device.
        """
        if device.type != "sky":
            raise ConfigurationError(f"SkyAccelerator was given {device}. Give it a sky device: devices=[0]")
        DEVICES.current = DEVICES.of(device).index

    def get_device_stats(self, device: torch.device | str | int | None) -> dict[str, object]:
        """The worker's memory statistics in bytes; one round trip."""
        chosen = DEVICES.of(device)
        stats: dict[str, object] = chosen.session.call("memory_stats", chosen.place)
        return stats

    def teardown(self) -> None:
        """Nothing: the device stays usable after training."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """The numbers of the devices that `devices=` names; a count of 1 means the current one.

        Raises:
            ConfigurationError: more than one, or none.
        """
        if isinstance(devices, str):
            numbers = [int(part) for part in devices.split(",") if part.strip()]
            devices = numbers if "," in devices else numbers[0]
        if devices == 1:
            return [DEVICES.current]
        if not isinstance(devices, int) and len(devices) == 1:
            return [DEVICES.at(devices[0]).index]
        raise ConfigurationError(
            f"devices={devices!r}: Lightning trains on one sky device a process, devices=[0] for sky:0. To train on "
            "several workers, run the Trainer itself on a pool: skyproxy.Compute(nodes=...) with "
            "skyproxy.plugins.torch()."
        )

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """The devices with these numbers."""
        return [torch.device("sky", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """1, however many there are: Lightning would start a process for each."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """True: with nothing configured, an embedded worker serves `sky:0`."""
        return True

    @staticmethod
    def name() -> str:
        """Return "sky"."""
        return "sky"


def _wrap_choose_strategy(
    choose: Callable[[object], object], single_device: Callable[..., object]
) -> Callable[[object], object]:
    """The strategy for one of our devices; Lightning knows only "cuda" and "mps" by name, and takes the CPU."""

    @functools.wraps(choose)
    def choose_strategy(self: Any) -> Any:
        if isinstance(self.accelerator, _SkyDevices) and self._num_nodes_flag == 1:
            return single_device(device=self._parallel_devices[0])
        return choose(self)

    return choose_strategy


def _cast(check: Callable[[object], Any], mixed: object) -> Callable[[object], object]:
    """Mixed precision with autocast and gradient scaler of our device, where Lightning takes those of CUDA."""

    @functools.wraps(check)
    def check_and_init_precision(self: Any) -> Any:
        precision = check(self)
        if isinstance(self.accelerator, _SkyDevices) and type(precision) is mixed and precision.device != "sky":
            return mixed(precision.precision, "sky")
        return precision

    return check_and_init_precision


def _complete(connector: object, single_device: Callable[..., object], mixed: object, trains: str) -> None:
    """Complete a connector's two decisions.

    Args:
        trains: the test that trains with this connector.

    Raises:
        ConfigurationError: if this Lightning decides elsewhere.
    """
    patching.wrap(
        connector,
        "_choose_strategy",
        lambda choose: _wrap_choose_strategy(choose, single_device),
        why="Lightning takes its strategy for one device only for accelerators that it knows by name",
        test=f"{_TESTS}::{trains}",
        when=When.LIGHTNING,
    )
    patching.wrap(
        connector,
        "_check_and_init_precision",
        lambda check: _cast(check, mixed),
        why="mixed precision takes autocast and gradient scaler of CUDA, whatever the accelerator",
        test=f"{_TESTS}::test_mixed_precision_is_that_of_the_device",
        when=When.LIGHTNING,
    )


def _forget(registry: Any) -> None:
    """Take our accelerator out; the next import of this module registers it again."""
    registry.pop("sky", None)
    sys.modules.pop(__name__, None)
    vars(sys.modules[__package__]).pop("lightning", None)


def _register(trainer: str, fabric: str) -> Any:
    """Registers an accelerator with one distribution of Lightning; its class."""

    def found(package: str, module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    base = found(trainer, "accelerators", "Accelerator")
    accelerator = type("SkyAccelerator", (_SkyDevices, base), {"__doc__": _SkyDevices.__doc__, "__module__": __name__})
    for package, registry_name, connector, trains in (
        (
            trainer,
            "AcceleratorRegistry",
            "trainer.connectors.accelerator_connector._AcceleratorConnector",
            "test_a_trainer_repeats_the_local_losses",
        ),
        (fabric, "ACCELERATOR_REGISTRY", "connector._Connector", "test_fabric_repeats_the_local_losses"),
    ):
        registry = found(package, "accelerators", registry_name)
        registry.register("sky", accelerator, description="sky devices", override=True)
        patching.registered(
            f"{package}.accelerators.{registry_name}",
            functools.partial(_forget, registry),
            why="`accelerator='sky'` is looked up there",
            test=f"{_TESTS}::{trains}",
            when=When.LIGHTNING,
        )
        module, _, name = connector.rpartition(".")
        single_device = found(package, "strategies", "SingleDeviceStrategy")
        mixed = found(package, "plugins.precision", "MixedPrecision")
        _complete(found(package, module, name), single_device, mixed, trains)
    return accelerator


def _register_all() -> object:
    """Registers with the distributions that were imported already, or else with the first that is installed.

    Raises:
        ImportError: there is none.
    """
    chosen = [pair for pair in _PACKAGES if pair[0] in sys.modules]
    if not chosen:
        chosen = [pair for pair in _PACKAGES if importlib.util.find_spec(pair[0].partition(".")[0]) is not None][:1]
    if not chosen:
        raise ImportError("Lightning is not installed here. Try: pip install lightning")
    first, *_ = [_register(*pair) for pair in chosen]
    return first


if TYPE_CHECKING:

    class SkyAccelerator(_SkyDevices):
        """`Trainer(accelerator="sky", devices=[1])`, or an instance of this class in the place of "sky"."""

else:
    SkyAccelerator = _register_all()

__all__ = ["SkyAccelerator"]
