"""The devices of a worker: what they are together, and the one that a command names."""

from __future__ import annotations

import pytest
import torch

from skyproxy.errors import UnsupportedOpError
from skyproxy_server.devices import WorkerDevices

CPU = {"type": "cpu", "index": 0, "name": "CPU"}
CUDA = {"type": "cuda", "index": 0, "name": "GPU"}


@pytest.mark.parametrize(("rows", "has_cuda", "on_cpu"), [([CPU], False, True), ([CUDA], True, False)])
def test_devices_know_what_they_are_together(rows: list[dict[str, object]], has_cuda: bool, on_cpu: bool) -> None:
    devices = WorkerDevices(rows)
    assert list(devices) == rows
    assert (devices.has_cuda, devices.on_cpu) == (has_cuda, on_cpu)


def test_a_device_is_named_by_type_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert WorkerDevices([CPU]).find(["cpu", None]) == torch.device("cpu")
    assert WorkerDevices([CUDA]).find(["cuda", 0]) == torch.device("cuda", 0)


def test_a_worker_without_gpus_has_none_to_name() -> None:
    with pytest.raises(UnsupportedOpError):
        WorkerDevices([CPU]).find(["cuda", 0])
