"""Hugging Face's training loops on a remote device: accelerate's `Accelerator` and transformers' `Trainer`.

Both take the device that the environment variable ACCELERATE_TORCH_DEVICE names, except for two places where
transformers looks at this machine: `Trainer` prefers an accelerator that it knows (`mps` on a Mac), and refuses bf16
where this machine has none. `use` sets the variable and completes these two.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import TracebackType
from typing import Any

import torch

from skyproxy import patching
from skyproxy.errors import ConfigurationError
from skyproxy.patching import When
from skyproxy.tensor.core.devices import DEVICES

_VARIABLE = "ACCELERATE_TORCH_DEVICE"


class use:
    """Makes `Accelerator`, `TrainingArguments` and `Trainer` take a sky device from now on, or inside a `with` block.

    accelerate has one device a process: an `Accelerator` made before, on another one, is not to be used afterwards.

    Args:
        device: "sky:0".

    Raises:
        ConfigurationError: it is not a sky device, or there is no such one.
        ImportError: accelerate is not installed.
    """

    def __init__(self, device: str | torch.device = "sky:0") -> None:
        chosen = torch.device(device)
        if chosen.type != "sky":
            raise ConfigurationError(f"{device} is not a sky device. Name one: use('sky:0')")
        self.device = DEVICES.of(chosen).torch_device
        _forget_choice(self.device)
        if importlib.util.find_spec("transformers") is not None:
            _complete_transformers(importlib.import_module("transformers.training_args"))
        self._before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = str(self.device)

    def stop(self) -> None:
        """Lets later `TrainingArguments` choose as before; what was made until now keeps its device. Idempotent."""
        if self._before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = self._before

    def __enter__(self) -> use:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _forget_choice(device: torch.device) -> None:
    """Forget a choice that accelerate made before, which it does once a process; as every new `TrainingArguments` does.

    Raises:
        ImportError: accelerate is not installed.
    """
    try:
        state = importlib.import_module("accelerate.state")
    except ModuleNotFoundError as error:
        raise ImportError("accelerate is not installed here. Try: pip install accelerate") from error
    if state.PartialState._shared_state.get("device") not in (None, device):
        state.AcceleratorState._reset_state(reset_partial_state=True)


def _device_of_environment() -> torch.device | None:
    """The sky device that the environment asks for."""
    name = os.environ.get(_VARIABLE, "")
    return torch.device(name) if name.partition(":")[0] == "sky" else None


def _complete_transformers(module: Any) -> None:
    """Makes `TrainingArguments` obey the variable on machines with an accelerator of their own; idempotent.

    Raises:
        ConfigurationError: this transformers chooses its device elsewhere.
    """
    patching.require(module, "is_torch_bf16_gpu_available")
    patching.require(module.TrainingArguments, "_setup_devices")
    setup, has_bfloat16 = vars(module.TrainingArguments)["_setup_devices"], module.is_torch_bf16_gpu_available
    if hasattr(has_bfloat16, "_sky"):
        return

    def setup_devices(self: Any) -> torch.device:
        device: torch.device = plain_setup(self)
        place = None if self.use_cpu else _device_of_environment()
        if place is None or self.distributed_state is None or self.distributed_state.device != place:
            return device
        self._n_gpu = 1
        return place

    @functools.wraps(has_bfloat16)
    def bfloat16_available() -> bool:
        place = _device_of_environment()
        return bool(has_bfloat16() if place is None else torch.get_device_module("sky").is_bf16_supported())

    plain_setup = setup.func
    bfloat16_available._sky = True  # type: ignore[attr-defined]
    patching.replace(
        setup,
        "func",
        functools.wraps(plain_setup)(setup_devices),
        label=f"{module.__name__}.TrainingArguments._setup_devices",
        why="`TrainingArguments` prefers an accelerator of this machine that it knows by name, such as `mps`",
        test="tests/integrations/test_trainer.py::test_an_accelerator_of_this_machine_is_not_preferred",
        when=When.HUGGINGFACE,
    )
    patching.replace(
        module,
        "is_torch_bf16_gpu_available",
        bfloat16_available,
        why="`TrainingArguments(bf16=True)` asks this machine, not the worker",
        test="tests/integrations/test_trainer.py::test_bfloat16_is_what_the_worker_can_do",
        when=When.HUGGINGFACE,
    )


__all__ = ["use"]
