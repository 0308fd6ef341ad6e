"""A plugin of pytest for the test suites of other libraries: makes them use a device, takes a sample, writes reports.

It is imported by its file's name in their processes, where the package `tests` is theirs. Variables tell it what to do:

    UPSTREAM_LIBRARY    whose tests these are
    UPSTREAM_DEVICE     "cpu" or a remote device
    UPSTREAM_SAMPLE     how many tests to run; all of them where it is 0
    UPSTREAM_SEED       what the sample depends on beside the names of the tests
    UPSTREAM_REPORT     the file to which a line is added for each phase of a test
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Tell the library what its device is, before its tests are imported."""
    device = os.environ["UPSTREAM_DEVICE"]
    if device != "cpu":
        import skyproxy  # noqa: F401
    _PREPARE[os.environ["UPSTREAM_LIBRARY"]](device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a sample: the tests whose names have the smallest hashes, in their former order."""
    size = int(os.environ["UPSTREAM_SAMPLE"])
    if not 0 < size < len(items):
        return
    kept = set(sample([item.nodeid for item in items], size, os.environ["UPSTREAM_SEED"]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what became of a phase at once: a process that dies later takes nothing with it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that started this one gets the same report
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", text)
    message = (crash.strip().splitlines() or [""])[0][:300]
    line = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome, "message": message}
    with open(os.environ["UPSTREAM_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def sample(names: list[str], size: int, seed: str) -> list[str]:
    """Return the names whose hashes are smallest: the same in every process, most of them in the next version."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())[:size]


def _prepare_timm(device: str) -> None:
    os.environ["TORCH_DEVICE"] = device
    _declare_torchvision_ops()


def _prepare_peft(device: str) -> None:
    kind = device.partition(":")[0]  # its tests compare with `tensor.device.type`
    _prepare_accelerate(device)
    import peft

    _replace(peft.utils.infer_device, lambda: kind)


def _prepare_accelerate(device: str) -> None:
    if device == "cpu":
        return
    import torch
    from accelerate.test_utils import testing

    kind, allocated = device.partition(":")[0], torch.sky.memory_allocated
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    _replace(testing.memory_allocated_func, allocated)
    _replace(testing.get_backend, lambda: (kind, 1, allocated))
    testing.torch_device = sys.modules["accelerate.test_utils"].torch_device = kind


def _replace(former: Callable[..., object], new: Callable[..., object]) -> None:
    """Replace a function in all modules that have imported it."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is former:
                setattr(module, name, new)


def _declare_torchvision_ops() -> None:
    """Declare what `import torchvision` asks for where its compiled part does not load: PyPI's wheel is for CUDA."""
    import torch

    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            _library.append(torch.library.Library("torchvision", "FRAGMENT"))
            _library[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_library: list[object] = []
_PREPARE: dict[str, Callable[[str], None]] = {
    "timm": _prepare_timm,
    "peft": _prepare_peft,
    "accelerate": _prepare_accelerate,
}
