"""The devices of a worker, as it announces them, and the one that a command names."""

from __future__ import annotations

from typing import Any

import torch

from skyproxy_server.argument_checks import check_device
from skyproxy_server.inventory import DeviceRow


class WorkerDevices(list[DeviceRow]):
    """The rows of a worker's inventory: each has "type", "index" and what is known of the device."""

    @property
    def has_cuda(self) -> bool:
        """True if any of them is one of CUDA."""
        return any(row["type"] == "cuda" for row in self)

    @property
    def on_cpu(self) -> bool:
        """True if all of them are the CPU."""
        return all(row["type"] == "cpu" for row in self)

    def find(self, fields: Any) -> torch.device:
        """Return the device that `[type, index]` names.

        Raises:
            UnsupportedOpError: the worker does not offer it.
        """
        kind, index = fields
        device = torch.device(kind, index) if index is not None else torch.device(kind)
        check_device(device, on_cpu=self.on_cpu)
        return device
