"""`import skyproxy` changes nothing for a program that never uses it, but for what docs/topics/unused.md lists."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import copy, json, signal, sys, threading, warnings
if "skyproxy" in sys.argv:
    import skyproxy
import torch
from torch.utils.data import DataLoader, TensorDataset

accelerator, data = torch.accelerator, TensorDataset(torch.arange(2.0))


def in_block(device):
    with accelerator.device_index(device):
        return True


class Own(torch.Stream):
    x = torch.ones(2, requires_grad=True)


QUESTIONS = {
    "current_accelerator": accelerator.current_accelerator,
    "current_accelerator, checked": lambda: accelerator.current_accelerator(check_available=True),
    "is_available": accelerator.is_available,
    "device_count": accelerator.device_count,
    "current_device_index": accelerator.current_device_index,
    "set_device_index": lambda: accelerator.set_device_index(0),
    "current_stream": accelerator.current_stream,
    "synchronize": accelerator.synchronize,
    "device_index": lambda: in_block(0),
    "device_index of None": lambda: in_block(None),
    "memory_allocated": accelerator.memory.memory_allocated,
    "empty_cache": accelerator.memory.empty_cache,
    "get_device_module": lambda: torch.get_device_module().__name__,
    "pin_memory": lambda: torch.ones(2).pin_memory(),
    "is_pinned": lambda: torch.ones(2).is_pinned(),
    "storage.pin_memory": lambda: torch.ones(2).untyped_storage().pin_memory(),
    "DataLoader, pinned": lambda: [x[0].tolist() for x in DataLoader(data, pin_memory=True)],
    "DataLoader": lambda: [x[0].tolist() for x in DataLoader(data)],
    "Stream()": torch.Stream,
    "Stream(0)": lambda: torch.Stream(0),
    "Stream of CUDA": lambda: torch.Stream(device="cuda"),
    "Event()": torch.Event,
    "subclass of Stream": lambda: issubclass(Own, torch.Stream) and Own.__mro__[-1].__name__,
    "Generator": lambda: (torch.Generator().initial_seed(), isinstance(torch.default_generator, torch.Generator)),
    "engine": lambda: type(torch.autograd.Variable._execution_engine).__name__,
    "multithreaded backward": torch._C._is_multithreading_enabled,
    "SIGINT": lambda: signal.getsignal(signal.SIGINT),
    "SIGTERM": lambda: signal.getsignal(signal.SIGTERM),
    "signal.signal": lambda: signal.signal.__module__,
    "threads": lambda: [thread.name for thread in threading.enumerate()],
    "setters of modes": lambda: sorted(
        name for name in dir(torch._C) if name[:5] == "_set_" and type(getattr(torch._C, name)) is not type(len)
    ),
    "set_flush_denormal": lambda: torch.set_flush_denormal,
    "cudnn.benchmark": lambda: type(torch.backends.cudnn).benchmark,
    "default dtype and device": lambda: (torch.get_default_dtype(), torch.get_default_device()),
    "autocast": lambda: [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
    "GradScaler": lambda: torch.amp.GradScaler().is_enabled(),
    "backward": lambda: torch.autograd.grad(Own.x.sum(), [Own.x]),
    "manual_seed": lambda: (torch.manual_seed(3).initial_seed(), torch.rand(2).tolist()),
    "swap of parameters": torch.__future__.get_swap_module_params_on_conversion,
    "storage": lambda: (type(torch.ones(1).untyped_storage()).__name__, copy.deepcopy(torch.ones(2)).data),
    "methods of tensors": lambda: sorted(name for name in dir(torch.Tensor) if "sky" not in name),
}
answers = {}
for name, question in QUESTIONS.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = repr(question())
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
    answers[name] = [answer, [str(warning.message) for warning in caught]]
print(json.dumps(answers))
"""


def _answers(*arguments: str) -> dict[str, list[object]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, list[object]]:
    return _answers()


def test_a_program_that_never_uses_it_sees_what_it_would_see_without_it(plain: dict[str, list[object]]) -> None:
    found = _answers("skyproxy")
    assert found.keys() == plain.keys()
    assert {name: found[name] for name in plain if found[name] != plain[name]} == {}
