"""The host's side: pinned memory, data loaders beside a live session, `torch.accelerator`."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import skyproxy  # noqa: F401  (registers the device)


def test_pinning_works_without_cuda_and_without_warnings(sky1: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("with CUDA, memory is pinned for CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.arange(6.0).view(2, 3).t()
        pinned = x.pin_memory()
        assert torch.equal(pinned, x)
        assert pinned.data_ptr() != x.data_ptr()
        assert pinned.is_pinned()
        assert pinned[1:].is_pinned()
        assert not x.is_pinned()
        assert not pinned.clone().is_pinned()
        assert pinned.pin_memory() is pinned
        assert torch.equal(pinned.to(sky1, non_blocking=True).cpu(), x)


_IMPORTS = """
import importlib, os, torch
known = torch._C._accelerator_getAccelerator
torch._C._accelerator_getAccelerator = lambda: known() or torch.device("cuda")  # a build with CUDA
torch._C._cuda_getDeviceCount = lambda: os._exit(3)  # it starts the driver of CUDA
for name in ("skyproxy.tensor.activation", "skyproxy_server.functions.isolated_process",
             "skyproxy_server.isolation.session_process"):
    importlib.import_module(name)
assert "sky" in str(torch.device("sky"))
"""


def test_an_import_does_not_start_cuda_so_that_processes_forked_after_it_can() -> None:
    assert subprocess.run([sys.executable, "-c", _IMPORTS], timeout=100, check=False).returncode == 0


_BEFORE_ANY_DEVICE = """
import torch
known = torch._C._accelerator_getAccelerator
torch._C._accelerator_getAccelerator = lambda: known() or torch.device("cuda")  # a build with CUDA, and without a GPU
import skyproxy
for ask in (torch.Stream, lambda: torch.Stream(0), lambda: torch.Stream(device=0, priority=0),
            lambda: torch.Event(enable_timing=True).device, lambda: torch.Event(0).device, torch.ones(2).pin_memory):
    try:
        print(ask())
    except Exception as error:
        print("cuda" if "cuda" in str(error).lower() or "NVIDIA" in str(error) else repr(error))
"""


def test_streams_and_pinned_memory_are_of_this_machines_own_accelerator_before_the_first_device() -> None:
    done = subprocess.run([sys.executable, "-c", _BEFORE_ANY_DEVICE], capture_output=True, text=True, timeout=100)
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} == {"cuda"}, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 6


def test_with_cuda_pytorch_itself_says_what_is_pinned_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch.ones(2).is_pinned()
    with pytest.warns(DeprecationWarning, match="argument 'device'"):
        assert not torch.ones(2).is_pinned("cuda")


def test_with_cuda_memory_is_pinned_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pin(key: torch._C.DispatchKey, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        asked.append((key.name, device.type))
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.aten._pin_memory.default, "_op_dk", pin)
    pinned = torch.ones(2).pin_memory()
    assert (pinned.is_pinned(), asked) == (True, [("CompositeExplicitAutograd", "cuda")])


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "multiprocessing_context": "spawn"}])
def test_data_loaders_work_beside_a_live_session(options: dict[str, Any], sky1: str) -> None:
    before = torch.ones(2, device=sky1)
    data = TensorDataset(torch.arange(8.0).view(8, 1))
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*suggested max number of worker.*")
        for (batch,) in DataLoader(data, batch_size=4, pin_memory=True, **options):
            seen += batch.to(sky1, non_blocking=True).flatten().tolist()
    assert seen == list(range(8))
    assert (before + 1).tolist() == [2, 2]


def test_a_batch_may_change_after_a_non_blocking_copy(sky1: str) -> None:
    for size in (10, 1_000_000):
        x = torch.ones(size)
        remote = x.to(sky1, non_blocking=True)
        x.zero_()
        assert remote.sum().item() == size


def test_sky_is_the_accelerator(sky1: str) -> None:
    accelerator = torch.accelerator
    assert str(accelerator.current_accelerator()) == "sky"
    assert accelerator.is_available()
    assert accelerator.device_count() == torch.sky.device_count() >= 2
    assert torch.get_device_module() is torch.sky  # type: ignore[attr-defined]
    accelerator.synchronize()
    accelerator.synchronize(1)


def test_the_current_device_can_be_changed(sky: str, sky1: str) -> None:
    accelerator = torch.accelerator
    assert accelerator.current_device_index() == 0
    try:
        accelerator.set_device_index(1)
        assert accelerator.current_device_index() == torch.sky.current_device() == 1  # type: ignore[attr-defined]
        assert torch.empty(1, device="sky").device == torch.device(sky1)
        with accelerator.device_index(0):
            assert torch.empty(1, device="sky").device == torch.device(sky)
        with accelerator.device_index(None):
            assert accelerator.current_device_index() == 1
        accelerator.set_device_index(torch.device(sky))
    finally:
        accelerator.set_device_index(0)
    assert torch.empty(1, device="sky").device == torch.device(sky)


def test_the_accelerator_tells_of_its_memory(sky: str) -> None:
    x = torch.zeros(1 << 20, device=sky)
    memory = torch.accelerator.memory
    assert memory.memory_allocated(0) >= x.nbytes
    assert memory.max_memory_allocated(0) >= memory.memory_allocated(0) - x.nbytes
    free, total = memory.get_memory_info(0)
    assert 0 < free <= total
    memory.reset_peak_memory_stats(0)
    memory.empty_cache()


def test_generic_streams_and_events_exist(sky1: str) -> None:
    assert torch.accelerator.current_stream(1).device == torch.device(sky1)
    assert torch.bfloat16 in torch.accelerator.get_device_capability(1)["supported_dtypes"]


def test_a_device_that_does_not_exist_raises_what_programs_expect_of_pytorch(sky: str) -> None:
    for use in (lambda: torch.ones(2, device="sky:77"), lambda: torch.accelerator.set_device_index(77)):
        with pytest.raises(RuntimeError, match="there is no sky:77"):
            use()
