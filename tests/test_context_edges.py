"""No handler of a signal divides the switching of a mode: contexts are entered and left as a whole."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from skyproxy import interrupts
from skyproxy.tensor.core.prefetching import READER, reading_ahead
from skyproxy.tensor.dispatch.fake_tensors import fake_mode

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends POSIX signals")

EDGES = ("__enter__", "__exit__")


class Struck(BaseException):
    """What the handler raises."""


class Dispatching(TorchDispatchMode):
    """Changes nothing."""


class Overriding(TorchFunctionMode):
    """Changes nothing."""


@contextlib.contextmanager
def modes_taken_away() -> Iterator[None]:
    with Dispatching(), _disable_current_modes():
        yield


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "dual_level": torch.autograd.forward_ad.dual_level,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "autocast": lambda: torch.autocast("cpu"),
    "fake mode": fake_mode,
    "dispatch mode": Dispatching,
    "function mode": Overriding,
    "device": lambda: DeviceContext("meta"),
    "modes taken away": modes_taken_away,
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "current device": lambda: torch.sky.device(0),
    "stream": lambda: torch.sky.stream(torch.sky.Stream()),
    "reading ahead": reading_ahead,
}


def modes() -> list[object]:
    """Whatever the contexts switch."""
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch.autograd.forward_ad._current_level,
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_dispatch_stack(),
        torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE),
        torch._C._len_torch_function_stack(),
        torch.empty(0).device,
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.sky.current_device(),
        torch.sky.current_stream(),
        READER.ahead,
    ]


class Striker:
    """Lets a signal strike as a context is entered and left, from within; its handler raises once."""

    def __init__(self) -> None:
        self.strikes = 0

    def handle(self, number: int, frame: object) -> None:
        self.strikes += 1
        if self.strikes == 1:
            raise Struck

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name in EDGES and event in ("call", "return"):
            signal.raise_signal(signal.SIGUSR1)


@pytest.fixture
def striker() -> Iterator[Striker]:
    made = Striker()
    before = signal.signal(signal.SIGUSR1, made.handle)
    yield made
    sys.setprofile(None)
    while interrupts.deferred:
        pass
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("sky")
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_signal_at_the_edge_of_a_context_strikes_later_and_leaves_no_mode_behind(
    name: str, edge: str, striker: Striker
) -> None:
    make = CONTEXTS[name]
    with make():  # what is loaded the first time
        pass
    before, context, struck = modes(), make(), False
    try:
        sys.setprofile(striker.profile if edge == "__enter__" else None)
        with context:
            sys.setprofile(striker.profile if edge == "__exit__" else None)
        sys.setprofile(None)
        time.sleep(5)  # a strike ends it
    except Struck:
        struck = True
    assert modes() == before
    assert struck


@pytest.mark.usefixtures("sky")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_handler_that_raises_around_the_step_of_an_optimizer_leaves_gradients_on(
    kind: type[torch.optim.Optimizer],
) -> None:
    weight = torch.ones(3, device="sky:0", requires_grad=True)
    optimizer = kind([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    left, struck, waited = 0, 0, 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left, waited
        caller = frame.f_back.f_code.co_name if frame.f_back is not None else ""
        frame.f_trace_opcodes = "_use_grad" in (frame.f_code.co_name, caller)
        if frame.f_trace_opcodes and event == "opcode":
            left -= 1
            if left == 0:
                if interrupts._is_safe(frame):  # so the handler of a signal runs here, and raises
                    raise Struck
                waited += 1
        return trace

    for instruction in itertools.count(1):
        left = instruction
        with contextlib.suppress(Struck):
            try:
                sys.settrace(trace)
                optimizer.step()
            finally:
                sys.settrace(None)
        on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert on, instruction
        if left > 0:
            break
        struck = instruction - waited
    assert struck > 50
    assert waited > 10
