"""`import skyproxy` changes nothing for a program that never uses it, but for what docs/topics/unused.md lists."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, copy, faulthandler, gc, io, json, logging, multiprocessing, os, pickle, signal, sys, threading, warnings
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


class Calls(torch.overrides.TorchFunctionMode):
    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def seen(mode, act):
    with mode:
        act()
    return mode.names


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue()), torch.load(io.BytesIO(file.getvalue()))


def config(name):
    module = sys.modules.get(name)
    known = {} if module is None else module.get_config_copy()
    return [(key, known[key]) for key in sorted(known) if type(known[key]) in (bool, int, float, str, type(None))]


model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GroupNorm(1, 2), torch.nn.GELU()), torch.ones(1, 2)
F = torch.nn.functional
layers = {
    "linear": lambda: model(x).sum().backward(),
    "encoder": lambda: torch.nn.TransformerEncoderLayer(4, 2, 4)(torch.ones(1, 2, 4)),
    "encoder, evaluating": lambda: torch.nn.TransformerEncoderLayer(4, 2, 4).eval()(torch.ones(1, 2, 4)),
    "LSTM": lambda: torch.nn.LSTM(2, 2)(torch.ones(1, 1, 2))[0].sum().backward(),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3),
    "cross entropy": lambda: F.cross_entropy(torch.ones(1, 2, requires_grad=True), torch.zeros(1).long()).backward(),
    "products": lambda: torch.matmul(torch.ones(2, 2, 2), torch.ones(2, 2)),
    "values": lambda: (x.tolist(), x.sum().item(), x.numpy(), x.type(), x.data, copy.deepcopy(x), x.to("cpu")),
    "a step": lambda: torch.optim.AdamW(model.parameters()).step(),
}


QUESTIONS = {
    "collector": lambda: (gc.get_threshold(), gc.isenabled(), gc.get_debug(), len(gc.callbacks), gc.get_freeze_count()),
    "interpreter": lambda: (sys.getswitchinterval(), sys.getrecursionlimit(), sys.gettrace(), sys.getprofile()),
    "hooks": lambda: [
        hook.__module__ for hook in (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook)
    ],
    "all signals": lambda: [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "wake-up descriptor": lambda: signal.set_wakeup_fd(-1),
    "filters of warnings": lambda: [(one[0], str(one[1]), one[2].__name__) for one in warnings.filters],
    "showwarning": lambda: (warnings.showwarning.__module__, warnings.warn.__module__),
    "environment": lambda: sorted(one for one in os.environ.items() if one[0] != "PYTEST_CURRENT_TEST"),
    "logging": lambda: (logging.root.handlers, logging.root.level, logging.root.filters, logging.getLoggerClass()),
    "files": lambda: len(os.listdir("/proc/self/fd")),
    "threads of the system": lambda: len(os.listdir("/proc/self/task")),
    "children": multiprocessing.active_children,
    "threads that compute": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "start of processes": lambda: (
        multiprocessing.get_start_method(allow_none=True), torch.multiprocessing.get_sharing_strategy()
    ),
    "loops": lambda: type(asyncio.get_event_loop_policy()).__name__,
    "faulthandler": faulthandler.is_enabled,
    "paths": lambda: (sys.path, len(sys.path_hooks), os.getcwd()),
    "save and load": lambda: [saved(torch.arange(3.0)), saved(model.state_dict())[0], saved(torch.ones(2).half())],
    "pickles": lambda: [len(pickle.dumps(value)) for value in (torch.arange(3.0), torch.nn.Parameter(x), torch.half)],
    "copies": lambda: copy.deepcopy(model),
    "Generator of None": lambda: torch.Generator(device=None).device,
    "Generator of something else": lambda: torch.Generator("nope"),
    "copied Generator": lambda: type(copy.deepcopy(torch.Generator())).__name__,
    "errors": lambda: torch.ones(2, device="cuda"),
    "moved to CUDA": lambda: model.cuda(),
    "a file that is not there": lambda: torch.load("/nothing/there"),
    "a device that is none": lambda: torch.device("foo"),
    "another default device": lambda: torch.set_default_device("foo"),
    "autocast elsewhere": lambda: torch.autocast("foo"),
    "a seed": lambda: torch.manual_seed(1 << 70),
    "checkpoint": lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).shape,
    "device of checkpoints": lambda: torch.utils.checkpoint.DefaultDeviceType.get_device_type(),
    "scripts": lambda: (torch.jit.script(torch.nn.ReLU()).code, torch.fx.symbolic_trace(model).code),
    "copies of scripts": lambda: copy.deepcopy(torch.jit.script(torch.nn.Linear(2, 2))).double().weight.dtype,
    "functions of others": lambda: [
        name for name, one in vars(torch).items() if callable(one) and not str(one.__module__).startswith("torch")
    ],
    "Dynamo": lambda: config("torch._dynamo.config"),
    "Inductor": lambda: config("torch._inductor.config"),
    "functorch": lambda: (torch.func.vmap(torch.sin)(x).tolist(), config("torch._functorch.config")),
    "modules": lambda: [
        (name, sorted(set(dir(sys.modules[name])) - {"sky"}))
        for name in ("torch", "torch._C", "torch.nn", "torch.autograd", "torch.serialization", "torch.accelerator")
    ],
    "modes": lambda: (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
    "one thread after a backward": lambda: (x.clone().requires_grad_().sum().backward(), threading.active_count()),
    **{f"functions of {name}": lambda act=act: seen(Calls(), act) for name, act in layers.items()},
    **{f"operations of {name}": lambda act=act: seen(Operations(), act) for name, act in layers.items()},
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
    of_a_build_for_gpus = {"engine"} if plain["current_accelerator"] != ["None", []] else set()
    assert {name: found[name] for name in plain.keys() - of_a_build_for_gpus if found[name] != plain[name]} == {}


def test_numbers_mean_sky_once_it_is_imported_as_the_page_says() -> None:
    program = "import torch, skyproxy; print(torch.device(1), torch.device('cpu', 0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert done.stdout == "sky:1 cpu:0\n", done.stderr
