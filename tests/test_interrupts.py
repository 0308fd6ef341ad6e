"""No signal, and nothing else that raises from outside, ends a process inside of PyTorch's C++."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]
import asyncio
import signal
from collections.abc import Callable, Iterator
from signal import signal as set_handler  # as ipykernel has it: bound before any device exists

import pytest
import torch

from skyproxy import interrupts
from skyproxy.tensor.dispatch import fake_tensors, inference
from tests.integration.programs import run_program, succeed

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends POSIX signals"),
    pytest.mark.timeout(280),
]

TRAINING = """
import ctypes, gc, random, signal, sys, threading, time
import torch, skyproxy

sys.unraisablehook = lambda info: None  # what strikes in a destructor cannot be raised, locally neither
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to("sky:0")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
inputs = torch.randn(4, 8).to("sky:0")

def step():
    optimizer.zero_grad()
    loss = (model(inputs) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()

step()
session = skyproxy.list_nodes()[0]._session

def held():
    gc.collect()  # tracebacks and hooks make cycles
    torch.sky.synchronize()
    torch.sky.synchronize()
    return session.call("stats")["handles"]

def check():
    '''The session is as it was: nothing leaked, and numbers are those of the CPU.'''
    optimizer.zero_grad()
    (model(inputs) ** 2).mean().backward()
    copy = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    copy.load_state_dict(model.state_dict())
    (copy(inputs.cpu()) ** 2).mean().backward()
    for ours, theirs in zip(model.parameters(), copy.parameters()):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    for _ in range(3):
        step()
    assert held() < before + 10, (before, held())

for _ in range(3):
    step()
before = held()
"""

STORM = """
import os
name, raised, strikes_wanted = sys.argv[1], eval(sys.argv[2]), 200
number = getattr(signal, name)
strikes, armed = 0, False

def handler(*unused):
    global strikes, armed
    if armed:
        armed = False
        strikes += 1
        if raised is SystemExit:
            sys.exit(3)
        raise raised()

def rage():
    chance = random.Random(1)
    while strikes < strikes_wanted:
        time.sleep(chance.choice((1e-4, 1e-3, 1e-2)) * chance.random())
        os.kill(os.getpid(), number)

signal.signal(number, handler)
thread = threading.Thread(target=rage)
if "setitimer" in sys.argv:
    kind = signal.ITIMER_PROF if name == "SIGPROF" else signal.ITIMER_REAL
    signal.setitimer(kind, 0.002, 0.0007)
else:
    thread.start()
came_to_an_end = 0
while strikes < strikes_wanted:
    try:
        armed = True
        for _ in range(3):
            step()
        armed = False
        came_to_an_end += 1
    except raised:
        torch.set_grad_enabled(True)  # PyTorch's optimizers leave it off where a signal strikes their own clean-up
if "setitimer" in sys.argv:
    signal.setitimer(kind, 0)
else:
    thread.join()
check()
"""


def run_storm(name: str, raised: str, *arguments: str) -> None:
    source = TRAINING + STORM
    head = f"import sys; sys.argv = {['', name, raised, *arguments]!r}\n"
    done = run_program(head + source, timeout=250, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize(
    ("name", "raised", "arguments"),
    [
        ("SIGINT", "KeyboardInterrupt", ()),
        ("SIGALRM", "TimeoutError", ("setitimer",)),
        ("SIGPROF", "RuntimeError", ("setitimer",)),
        ("SIGTERM", "SystemExit", ()),
        ("SIGUSR1", "type('Preempted', (BaseException,), {})", ()),
    ],
)
def test_two_hundred_strikes_of_a_signal_leave_a_sound_session(
    name: str, raised: str, arguments: tuple[str, ...]
) -> None:
    run_storm(name, raised, *arguments)


ASYNCHRONOUS = """
class Stopped(BaseException):
    pass

def rage():
    chance = random.Random(1)
    while wanted.wait():
        time.sleep(chance.choice((1e-3, 1e-2)) * chance.random())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(victim), ctypes.py_object(Stopped))
        wanted.clear()

def train():
    try:
        wanted.set()
        while wanted.is_set():
            step()
        step()
    except Stopped:
        return 1
    return 0

victim, wanted, strikes = threading.get_ident(), threading.Event(), 0
threading.Thread(target=rage, daemon=True).start()
while strikes < 100:
    try:
        strikes += train()
    except Stopped:
        pass
x = torch.arange(5.0, device="sky:0", requires_grad=True)
(x * x).sum().backward()
assert x.grad.tolist() == [0, 2, 4, 6, 8]
"""


def test_an_exception_set_from_another_thread_never_ends_the_process() -> None:
    done = run_program(TRAINING + ASYNCHRONOUS, timeout=250, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-3000:]}"


CONSTANTS = """
import operator, sys
import torch, skyproxy
from skyproxy import interrupts

entered = set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename == interrupts.__file__:
        entered.add(frame.f_code.co_name)

x = torch.ones(3, device="sky:0", requires_grad=True)
(x * 2).sum().backward()
left = sum(operator.length_hint(asked) for asked, _ in interrupts._answers)
sys.setprofile(note)
(x * 2).sum().backward()
sys.setprofile(None)
assert entered == {"take_parked_error"}, entered  # which `run_backward` calls
assert left > sum(operator.length_hint(asked) for asked, _ in interrupts._answers)
"""


def test_no_python_code_runs_where_cpp_asks_for_a_constant() -> None:
    """So nothing can be raised there, by a tracer or by whatever strikes between two bytecodes.

    In a process of its own: CPython 3.11 never leaves a function's entry under a profiler while an exception waits for
    another thread that is in C code, as tests of cancelled calls may leave one behind.
    """
    succeed(CONSTANTS)


def test_an_error_that_is_set_is_parked_with_its_cause(sky: str) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("of a hook") from KeyError("its cause")

    x = torch.ones(3, device=sky, requires_grad=True)
    y = x * 2
    y.register_hook(fail)
    with pytest.raises(ZeroDivisionError, match="of a hook") as caught:
        y.sum().backward()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.traceback[-1].name == "fail"
    assert not interrupts._parked


@pytest.fixture
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def seen() -> list[str]:
    return []


def handler_noting(seen: list[str], what: str = "struck") -> Callable[..., None]:
    return lambda number, frame: seen.append(what)


@interrupts.shielded
def strike_inside(seen: list[str]) -> None:
    signal.raise_signal(signal.SIGUSR1)
    seen.append("ended")


def wait_until_nothing_is_deferred() -> None:
    while interrupts.deferred:
        pass


@pytest.mark.usefixtures("sky", "own_handlers")
def test_every_handler_is_wrapped_and_programs_see_their_own(seen: list[str]) -> None:
    first, second = handler_noting(seen), handler_noting(seen)
    set_handler(signal.SIGUSR1, first)
    assert type(_signal.getsignal(signal.SIGUSR1)) is interrupts.DeferringSignalHandler
    assert signal.getsignal(signal.SIGUSR1) is first
    assert signal.signal(signal.SIGUSR1, second) is first
    assert signal.signal(signal.SIGUSR1, signal.SIG_IGN) is second
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("sky", "own_handlers")
def test_a_signal_inside_a_shielded_function_strikes_after_it(seen: list[str]) -> None:
    signal.signal(signal.SIGUSR1, handler_noting(seen))
    strike_inside(seen)
    while len(seen) < 2:
        pass
    wait_until_nothing_is_deferred()
    assert seen == ["ended", "struck"]


@pytest.mark.usefixtures("sky", "own_handlers")
@pytest.mark.parametrize("later", [signal.SIG_DFL, lambda number, frame: None])
def test_a_deferred_signal_strikes_the_handler_that_it_met(later: object, seen: list[str]) -> None:
    """The default of SIGUSR1 would end the process."""
    signal.signal(signal.SIGUSR1, handler_noting(seen))
    strike_inside(seen)
    signal.signal(signal.SIGUSR1, later)  # type: ignore[arg-type]
    assert seen == ["ended", "struck"]
    wait_until_nothing_is_deferred()
    assert seen == ["ended", "struck"]


@pytest.mark.usefixtures("sky")
def test_ctrl_c_cancels_the_main_task_of_asyncio() -> None:
    cancelled = []

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert cancelled
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("sky")
def test_an_event_loop_handles_each_signal_once(seen: list[str]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, seen.append, "handled")
        for _ in range(3):
            strike_inside(seen)
            while "handled" not in seen[-1] or interrupts.deferred:
                await asyncio.sleep(0)
        loop.remove_signal_handler(signal.SIGUSR1)

    asyncio.run(main())
    assert seen == ["ended", "handled"] * 3


@pytest.mark.usefixtures("own_handlers")
def test_an_exception_of_a_handler_is_no_failed_inference(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a fake tensor fails, the worker is asked; an alarm that strikes there must not be taken for that."""
    original = fake_tensors.fake_mode

    def struck() -> object:
        signal.raise_signal(signal.SIGUSR1)
        return original()

    def expire(number: int, frame: object) -> None:
        raise TimeoutError("too long")

    x = torch.ones(3, 5, 7, device=sky)
    signal.signal(signal.SIGUSR1, expire)
    monkeypatch.setattr(inference, "fake_mode", struck)
    with pytest.raises(TimeoutError, match="too long"):
        torch.linalg.lstsq(x, x)  # has no rule
    monkeypatch.undo()
    assert torch.linalg.lstsq(x, x).solution.shape == (3, 7, 7)


def test_handlers_are_wrapped_when_another_thread_makes_the_first_device() -> None:
    printed = succeed("""
    import _signal, signal, threading
    import torch, skyproxy
    signal.signal(signal.SIGUSR1, lambda *unused: print("struck"))
    thread = threading.Thread(target=lambda: torch.ones(1, device="sky:0").cpu())
    thread.start()
    thread.join()
    print(type(_signal.getsignal(signal.SIGUSR1)).__name__, type(_signal.getsignal(signal.SIGINT)).__name__)
    signal.raise_signal(signal.SIGUSR1)
    """)
    assert printed.split() == ["DeferringSignalHandler", "DeferringSignalHandler", "struck"]


def test_sigterm_in_backward_ends_the_program_with_its_own_status() -> None:
    done = run_program("""
    import os, signal, sys
    import torch, skyproxy
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(7))
    x = torch.ones(3, device="sky:0", requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGTERM))
    y.sum().backward()
    raise SystemExit("not reached")
    """)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize(
    "place", ["inside", pytest.param("before", marks=pytest.mark.slow), pytest.param("after", marks=pytest.mark.slow)]
)
def test_a_signal_while_autograd_asks_a_fake_tensor_for_its_device_strikes_a_moment_later(place: str) -> None:
    """As happens while a program is compiled. PyTorch asks in a function that must not throw, on the CPU as well."""
    printed = succeed(f"""
    import signal, sys
    import torch, skyproxy
    from torch._subclasses import fake_tensor
    torch.ones(1, device="sky:0").cpu()

    class Struck(BaseException):
        pass

    def expire(*unused):
        raise Struck

    DEVICE = torch.ops.prim.device.default
    tell, strikes = fake_tensor._DISPATCH_META_HANDLERS[DEVICE], 0

    def strike(at):
        global strikes
        if at == {place!r} and strikes < 1:
            strikes += 1
            signal.raise_signal(signal.SIGUSR1)

    def told(args):
        strike("inside")
        return tell(args)

    def trace(frame, event, argument):
        code = frame.f_code
        if code.co_filename.endswith(("_stats.py", "fake_tensor.py")) and DEVICE in [
            frame.f_locals.get("func"), *frame.f_locals.get("args", ())[1:2]
        ]:
            strike("before" if code.co_name == "wrapper" else "after" if event == "return" else "")
            return trace

    signal.signal(signal.SIGUSR1, expire)
    mode = fake_tensor.FakeTensorMode()
    with mode:
        x, w = (mode.from_tensor(torch.ones(3, 3)).detach() for _ in range(2))
        w.requires_grad_()
        fake_tensor._DISPATCH_META_HANDLERS[DEVICE] = told
        try:
            sys.settrace(trace)
            x @ w
            sys.settrace(None)
            while True:
                pass
        except Struck:
            sys.settrace(None)
            print("struck", strikes)
    """)
    assert printed == "struck 1"


def test_a_forked_child_defers_signals_of_its_own() -> None:
    printed = succeed("""
    import os, signal, warnings
    import torch, skyproxy
    from skyproxy import interrupts
    torch.ones(1, device="sky:0").cpu()
    warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, forks beside threads warn
    struck = []
    signal.signal(signal.SIGUSR1, lambda *unused: struck.append(os.getpid()))

    @interrupts.shielded
    def inside():
        signal.raise_signal(signal.SIGUSR1)
        return os.fork()

    child = inside()
    if child == 0:
        interrupts.shielded(lambda: signal.raise_signal(signal.SIGUSR1))()
        while not struck:
            pass
        os._exit(0)
    while not struck:
        pass
    print(os.waitpid(child, 0)[1])
    """)
    assert printed == "0"


def test_a_signal_in_a_hook_of_a_fork_strikes_after_it() -> None:
    """Python drops what hooks raise: a data loader's process that was stopped there ran on, with nobody to end it."""
    printed = succeed("""
    import os, signal, warnings
    import torch, skyproxy
    moment = ""

    def at(this):
        return lambda: moment == this and signal.raise_signal(signal.SIGINT)

    os.register_at_fork(before=at("before"), after_in_parent=at("parent"), after_in_child=at("child"))
    torch.ones(1, device="sky:0").cpu()
    os.register_at_fork(after_in_child=at("child, later"))
    warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, forks beside threads warn
    for moment in ("before", "parent", "child", "child, later"):
        child = None
        try:
            child = os.fork()
            if (child == 0) == moment.startswith("child"):
                signal.alarm(20)
                while True:
                    pass
        except KeyboardInterrupt:
            signal.alarm(0)
            print("after", moment, flush=True)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    """)
    assert printed.splitlines() == ["after before", "after parent", "after child", "after child, later"]
