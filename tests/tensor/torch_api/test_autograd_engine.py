"""Errors inside backward keep their exception and never abort the process; and other properties of the engine."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

PREAMBLE = """
import threading, time, _thread
import torch
import skyproxy
from skyproxy.errors import RemoteError
skyproxy.launch_local("cpu"); skyproxy.launch_local("cpu")
D = "sky:1"

class Breaks(torch.autograd.Function):
    error = ValueError("from backward")
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, g): raise Breaks.error

def leaf(): return torch.ones(3, device=D, requires_grad=True)

def raised(f):
    try: f()
    except BaseException as e: return e
    raise SystemExit("nothing was raised")

def fine():
    x = leaf()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]

def broken(*args): raise ZeroDivisionError("from a hook")

def run(name, case):
    Breaks.error = ValueError("from backward")
    try:
        case()
        print(name, "fine", sep="\\t", flush=True)
    except BaseException as e:
        print(name, repr(e), sep="\\t", flush=True)
"""

CASES = {
    "an op of the client": """
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: g + torch.ones(3, device="sky:0"))
        e = raised(lambda: y.sum().backward())
        assert isinstance(e, RuntimeError) and "same device" in str(e), repr(e)
    """,
    "an op of the worker": """
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: torch.linalg.inv(g.new_zeros(2, 2)).sum().item() * g)
        e = raised(lambda: y.sum().backward())
        assert isinstance(e, torch.linalg.LinAlgError) and isinstance(e, RemoteError), repr(e)
    """,
    "a tensor hook": """
        x = leaf()
        x.register_hook(broken)
        e = raised(lambda: (x * 2).sum().backward())
        assert isinstance(e, ZeroDivisionError) and str(e) == "from a hook", repr(e)
    """,
    "a node prehook": """
        y = leaf() * 2
        y.grad_fn.register_prehook(broken)
        assert isinstance(raised(lambda: y.sum().backward()), ZeroDivisionError)
    """,
    "a node hook": """
        y = leaf() * 2
        y.grad_fn.register_hook(broken)
        assert isinstance(raised(lambda: y.sum().backward()), ZeroDivisionError)
    """,
    "a post-accumulate hook": """
        x = leaf()
        x.register_post_accumulate_grad_hook(broken)
        assert isinstance(raised(lambda: (x * 2).sum().backward()), ZeroDivisionError)
    """,
    "a function of one's own": """
        e = raised(lambda: Breaks.apply(leaf()).sum().backward())
        assert e is Breaks.error, repr(e)
    """,
    "a saved-tensor hook": """
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, broken):
            y = leaf().exp().sum()
        assert isinstance(raised(y.backward), ZeroDivisionError)
    """,
    "KeyboardInterrupt": """
        Breaks.error = KeyboardInterrupt()
        assert isinstance(raised(lambda: Breaks.apply(leaf()).sum().backward()), KeyboardInterrupt)
    """,
    "Ctrl-C between two ops": """
        x = leaf()
        y = x * 2
        once = [_thread.interrupt_main]
        y.register_hook(lambda g: (once and once.pop()(), g * 2)[1])
        def passes():  # as many as it takes: the handler strikes a moment later
            end = time.monotonic() + 60
            while time.monotonic() < end: y.sum().backward(retain_graph=True)
        assert isinstance(raised(passes), KeyboardInterrupt)
    """,
    "SystemExit": """
        Breaks.error = SystemExit(3)
        assert isinstance(raised(lambda: Breaks.apply(leaf()).sum().backward()), SystemExit)
    """,
    "inside a checkpoint": """
        from torch.utils.checkpoint import checkpoint
        for reentrant in (False, True):
            x = leaf()
            y = checkpoint(lambda x: Breaks.apply(x * 2).tanh(), x, use_reentrant=reentrant)
            assert raised(lambda: y.sum().backward()) is Breaks.error
    """,
    "inside a backward inside a backward": """
        class Nested(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * 1
            @staticmethod
            def backward(ctx, g):
                with torch.enable_grad(): Breaks.apply(leaf()).sum().backward()
                return g
        assert raised(lambda: Nested.apply(leaf()).sum().backward()) is Breaks.error
    """,
    "torch.autograd.grad": """
        x = leaf()
        assert raised(lambda: torch.autograd.grad(Breaks.apply(x).sum(), x)) is Breaks.error
    """,
    "on another thread": """
        found = []
        def body(): found.append(raised(lambda: Breaks.apply(leaf()).sum().backward()))
        thread = threading.Thread(target=body); thread.start(); thread.join()
        assert found == [Breaks.error]
    """,
    "an error that PyTorch raises itself": """
        x = leaf()
        y = x.exp()
        y.add_(1)
        e = raised(lambda: y.sum().backward())
        assert "modified by an inplace operation" in str(e), repr(e)
        y = (x * 2).sum(); y.backward()
        assert "backward through the graph a second time" in str(raised(y.backward))
    """,
    "a caught error on the way": """
        def careful(g):
            try: raise KeyError("caught")
            except KeyError: return g * 2
        x = leaf()
        x.register_hook(careful)
        x.sum().backward()
        assert x.grad.tolist() == [2, 2, 2]
    """,
}


_LONGEST_SECONDS = 280
"""One process and its two workers import torch; where that outlasts the limit, all cases below fail with it."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each case; one process for all, so an abort shows as cases that were never reached."""
    script = PREAMBLE
    for number, (name, code) in enumerate(CASES.items()):
        script += f"def case_{number}():\n{textwrap.indent(textwrap.dedent(code), '    ')}\n    fine()\n"
        script += f"run({name!r}, case_{number})\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=_LONGEST_SECONDS
    )
    assert "terminate called" not in done.stderr, done.stderr[-3000:]
    found = dict(line.split("\t", 1) for line in done.stdout.splitlines())
    return {name: found.get(name, f"not reached; rc {done.returncode}: {done.stderr[-2000:]}") for name in CASES}


@pytest.mark.timeout(_LONGEST_SECONDS + 20)
@pytest.mark.parametrize("name", CASES)
def test_an_error_in_backward_is_raised_as_it_is(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == "fine"


def test_backward_runs_on_the_thread_that_calls_it(sky1: str) -> None:
    import threading

    seen = []
    x = torch.ones(2, device=sky1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(threading.current_thread()))
    y.sum().backward()
    assert seen == [threading.current_thread()]
    assert torch._C._is_multithreading_enabled()  # and is as before afterwards


_SHARED_LEAF = """
import sys, threading, time
import torch, skyproxy

class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient

sys.setswitchinterval(10)  # so this thread runs until it waits, as soon as the other one frees the interpreter lock
leaf = torch.ones(2, device="sky").requires_grad_()
ended = []

def use():
    while not ended:
        leaf.view_as(leaf)

other = threading.Thread(target=use)
other.start()
for _ in range(100):
    time.sleep(0)
    Same.apply(leaf)
    time.sleep(0)
    leaf.backward(torch.ones(2, device="sky"))
ended.append(True)
other.join()
print("ended", leaf.grad.tolist())
"""


def test_threads_that_share_a_leaf_do_not_wait_for_ever() -> None:
    command = [sys.executable, "-c", _SHARED_LEAF]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail("the program waits for ever")
    assert done.stdout.strip() == "ended [100.0, 100.0]", done.stderr[-2000:]


def test_keeping_what_threads_share_records_nothing_and_tells_modes_nothing(sky1: str) -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0]

    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    calls: list[Any] = []
    leaf = torch.ones(2, device=sky1, requires_grad=True)
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    try:
        torch.sky.synchronize()
        before = torch.sky.stats()["ops"]
        with Noted():
            result: torch.Tensor = Same.apply(leaf)  # type: ignore[no-untyped-call]
        torch.sky.synchronize()
        assert torch.sky.stats()["ops"] == before
        assert [func for func in calls if func is not torch.Tensor.detach] == []
        result.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [1, 1]
    finally:
        ends.set()
        other.join()


def test_a_deep_graph_runs_backward(sky1: str) -> None:
    x = torch.ones(3, device=sky1, requires_grad=True)
    y = x
    for _ in range(3000):
        y = y + 1
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]


def test_gradients_cross_devices_in_one_backward(sky: str, sky1: str) -> None:
    x = torch.ones(3, device=sky1, requires_grad=True)
    loss = (x.to(sky) * 2).sum().cpu() + (x * 3).sum().cpu() + x.cpu().sum()
    loss.backward()
    assert x.grad is not None
    assert x.grad.device == torch.device(sky1)
    assert x.grad.tolist() == [6, 6, 6]


def test_higher_derivatives_and_gradcheck_hold(sky1: str) -> None:
    x = torch.full((3,), 2.0, device=sky1, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [12, 12, 12]
    y = torch.randn(3, dtype=torch.double, device=sky1, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: t.sin() * 2, (y,))


def test_anomaly_mode_names_the_forward_call(sky1: str) -> None:
    with torch.autograd.set_detect_anomaly(True):
        x = torch.zeros(3, device=sky1, requires_grad=True)
        y = (x.sqrt() * 0).sum()
        with (
            pytest.warns(UserWarning, match=r"Error detected in SqrtBackward0(.|\n)*test_autograd_engine\.py"),
            pytest.raises(RuntimeError, match=r"SqrtBackward0.*returned nan"),
        ):
            y.backward()
    with torch.autograd.set_detect_anomaly(True):
        z = torch.ones(3, device=sky1, requires_grad=True)
        z.exp().sum().backward()
    assert z.grad is not None


def test_saved_tensors_can_wait_on_the_cpu(sky1: str) -> None:
    x = torch.ones(3, device=sky1, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x.exp() * x).sum()
    y.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad.cpu(), torch.full((3,), 2 * 2.718281828))


class Given(torch.autograd.Function):
    """Its gradient is what was given to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unused: object, gradient: Any) -> torch.Tensor:
        ctx.gradient = gradient
        return x * 2

    @staticmethod
    def backward(ctx: Any, *_: object) -> Any:
        return ctx.gradient, None, None


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize(
    ("own", "other"), [("sky:0", "cpu"), ("sky:0", "meta"), ("cpu", "sky:0"), ("sky:0", "sky:1"), ("sky:1", "sky:0")]
)
def test_a_gradient_of_another_device_is_an_error(own: str, other: str, is_leaf: bool, sky1: str) -> None:
    """It was added to others, became a leaf's gradient, or ended in an assertion of the engine."""
    x = torch.ones(3, device=own, requires_grad=True)
    y = x if is_leaf else x * 1
    wrong = torch.ones(3, device=other)
    message = f"invalid gradient at index 0 - expected device {own} but got {other}"
    with pytest.raises(RuntimeError, match=f"^Function GivenBackward returned an {message}"):
        Given.apply(y, "x", wrong).sum().backward()
    with pytest.raises(RuntimeError, match=f"^{message}"):
        (y * 2).backward(wrong)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        torch.autograd.grad(y * 2, x, wrong)
    assert x.grad is None


def test_a_gradient_without_dimensions_moves_to_its_device(sky1: str) -> None:
    x = torch.tensor(2.0, device=sky1, requires_grad=True)
    Given.apply(x * 1, "x", torch.tensor(3.0)).backward()
    (x * 2).backward(torch.tensor(5.0))
    assert x.grad is not None
    assert (x.grad.device, x.grad.item()) == (x.device, 13)


class _Nested(torch.autograd.Function):
    """A function whose backward does another backward, so many times deep."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, fails: bool) -> torch.Tensor:
        ctx.depth, ctx.fails, ctx.device = depth, fails, x.device
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                inner = torch.arange(3.0, device=ctx.device, requires_grad=True)
                _Nested.apply(inner.exp()[1:], ctx.depth - 1, ctx.fails).sum().backward()
            return gradients[0] * inner.grad[1:], None, None
        if ctx.fails:
            raise ZeroDivisionError("at the bottom")
        return gradients[0] * 3, None, None


def test_backward_goes_on_in_backward_deeper_than_pytorch_does_on_one_thread(sky1: str) -> None:
    """From the 60th on, PyTorch takes threads of its own, on which no function of Python calls operations."""
    found = []
    for place in ("cpu", sky1):
        x = torch.ones(2).to(place).requires_grad_()
        _Nested.apply(x, 70, False).sum().backward()
        found.append(x.grad.tolist())
        with pytest.raises(ZeroDivisionError, match="at the bottom"):
            _Nested.apply(x, 70, True).sum().backward()
    assert found[0] == found[1]
