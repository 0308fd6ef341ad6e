"""What an interrupt, or `torch.sky.cancel`, drops on a real worker, and what it leaves as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy import nodes
from skyproxy.errors import CancelledOperationError
from skyproxy.session import waiters
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES
from skyproxy_server.limits import are_sessions_separable
from tests.integration.chaos_proxy import chaos_proxy
from tests.integration.programs import wait_for, worker

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals"), pytest.mark.timeout(200)]

_MANY = 600
"""Products of matrices that keep any CPU busy for longer than a test needs to cancel them."""


@pytest.fixture(scope="module")
def launched(sky_devices: tuple[str, str]) -> Iterator[skyproxy.Node]:
    with skyproxy.launch_local("cpu") as made:
        made._session.cancels_on_interrupt = True  # as in a notebook
        yield made


@pytest.fixture
def node(launched: skyproxy.Node) -> skyproxy.Node:
    launched.synchronize()
    return launched


def keep_busy(device: torch.device, count: int = _MANY) -> torch.Tensor:
    """Record so many products, each of which takes the worker milliseconds at least; the last one."""
    x = torch.full((1536, 1536), 1 / 1536, device=device)
    assert x[0, 0].item() > 0
    y = x
    for _ in range(count):
        y = y @ x
    return y


def is_waiting(thread_id: int) -> bool:
    """Tell whether a thread is inside a wait for the worker."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code.co_filename == waiters.__file__:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def interrupt_once_it_waits() -> Iterator[None]:
    """Send SIGINT to this process as soon as its main thread waits."""
    main = threading.get_ident()

    def strike() -> None:
        wait_for(lambda: is_waiting(main), "the main thread waits")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def refuses(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's value raises that it was cancelled."""
    try:
        tensor.sum().item()
    except CancelledOperationError:
        return True
    return False


def test_an_interrupted_wait_frees_the_worker(node: skyproxy.Node) -> None:
    device = node.devices[0]
    kept, changed = torch.rand(1000, device=device), torch.zeros(3, device=device)
    before = kept.cpu()
    last = keep_busy(device)
    changed += 1
    with interrupt_once_it_waits(), pytest.raises(KeyboardInterrupt) as caught:
        last.sum().item()
    assert "CancelledOperationError" in caught.value.__notes__[0]
    assert torch.ones(2, device=device).sum().item() == 2
    assert node._session.cancelling.dropped > 1
    with pytest.raises(CancelledOperationError, match="Run its line again") as error:
        last.cpu()
    assert Path(error.value.user_line.rsplit(":", 1)[0]) == Path(__file__)
    assert error.value.user_line.endswith("in keep_busy")
    assert error.value.op == "aten::matmul"
    with pytest.raises(CancelledOperationError, match="keep the values"):
        changed.cpu()
    assert changed.tolist() == [0, 0, 0]  # it is told once
    assert torch.equal(kept.cpu(), before)
    torch.sky.synchronize(device)


@pytest.mark.parametrize("wait", ["synchronize", "download", "room"])
def test_every_wait_can_be_interrupted(node: skyproxy.Node, wait: str) -> None:
    device = node.devices[0]
    large = torch.zeros(1 << 20, device=device)
    x = large[:2] + 1
    last = keep_busy(device)
    if wait == "room":
        x = x * 1  # the first of what follows

    def act() -> None:
        nonlocal x
        if wait == "synchronize":
            node.synchronize()
        elif wait == "download":
            large.cpu()
        while wait == "room":
            x = x + 1

    with interrupt_once_it_waits(), pytest.raises(KeyboardInterrupt):
        act()
    assert large.sum().item() == 0
    assert refuses(last)


def test_it_is_cancelled_by_hand_and_shown(node: skyproxy.Node) -> None:
    device = node.devices[0]
    last = keep_busy(device)
    node._session.recorder.flush()
    seen = wait_for(lambda: (now := torch.sky.queue(device)).running and now, "it runs")
    assert seen.running == "aten::matmul"
    assert seen.line.endswith("in keep_busy")
    assert seen.is_working
    assert 0 < seen.operations < 2 * _MANY
    assert str(seen).startswith(f"{device} is working: ")
    torch.sky.cancel(device)
    assert refuses(last)
    assert not torch.sky.queue(device).operations
    torch.sky.cancel(device)  # nothing is left
    assert torch.ones(2, device=device).sum().item() == 2


def test_a_program_that_is_no_notebook_keeps_what_it_recorded(
    node: skyproxy.Node, sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may save its model when it is interrupted, and counts on the steps that it has recorded."""
    device = node.devices[0]
    monkeypatch.setattr(node._session, "cancels_on_interrupt", DEVICES.of(sky).session.cancels_on_interrupt)
    last = keep_busy(device, 5)
    with interrupt_once_it_waits(), pytest.raises(KeyboardInterrupt):
        last.sum().item()
    assert last[0, 0].item() == pytest.approx(1 / 1536, rel=1e-3)


def test_client_and_worker_stay_in_agreement(node: skyproxy.Node) -> None:
    """Definitions, names of batches, slots, shapes, uploads, captured graphs: what is recorded while all is dropped."""
    device = node.devices[0]
    data = torch.arange(6.0).reshape(2, 3)
    turned, source = data.to(device), data.to(device)
    graph, later = torch.sky.SkyGraph(), torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        made = source * 2
    graph.replay()
    assert made.tolist() == (data * 2).tolist()

    def loop() -> torch.Tensor:
        x = source
        for number in range(40):
            x = x * 0.5 + number
        return x

    expected = loop().cpu()
    last = keep_busy(device)
    turned.t_()
    uploaded, large = data.to(device), torch.ones(1 << 18).to(device)
    dropped = torch.special.erfcx(uploaded) + torch.linalg.matrix_norm(uploaded)  # defined here for the first time
    outcomes = [loop() for _ in range(30)]
    graph.replay()
    with torch.sky.graph(later):
        second = source * 3
    torch.sky.cancel(device)
    assert refuses(last)
    assert refuses(dropped)
    assert refuses(outcomes[-1])
    assert turned.tolist() == data.t().tolist()
    assert uploaded.tolist() == data.tolist()
    assert large.sum().item() == 1 << 18
    fresh = torch.special.erfcx(uploaded) + torch.linalg.matrix_norm(uploaded)
    torch.testing.assert_close(fresh.cpu(), torch.special.erfcx(data) + torch.linalg.matrix_norm(data))
    for _ in range(30):
        assert torch.equal(loop().cpu(), expected)
    later.replay()
    assert second.tolist() == (data * 3).tolist()
    assert refuses(made)
    graph.replay()
    assert made.tolist() == (data * 2).tolist()


def test_dropped_operations_draw_no_random_numbers(node: skyproxy.Node) -> None:
    device = node.devices[0]
    torch.sky.set_device(device)
    try:
        torch.sky.manual_seed(5)
        first, second = torch.rand(4, device=device).cpu(), torch.rand(4, device=device).cpu()
        last = keep_busy(device)
        torch.sky.manual_seed(5)
        dropped = torch.rand(4, device=device)
        torch.sky.cancel(device)
        assert refuses(last)
        assert refuses(dropped)
        assert torch.equal(torch.rand(4, device=device).cpu(), first)
        assert torch.equal(torch.rand(4, device=device).cpu(), second)
    finally:
        torch.sky.set_device(0)


def test_what_the_client_knew_of_numbers_is_asked_for_again(node: skyproxy.Node) -> None:
    device = node.devices[0]
    step = torch.zeros((), device=device)
    step += 1
    assert step.item() == 1
    keep_busy(device)
    step += 1
    torch.sky.cancel(device)
    assert refuses(step)
    assert step.item() == 1


def test_a_function_on_the_node_is_not_touched(node: skyproxy.Node) -> None:
    device = node.devices[0]
    x = torch.ones(3, device=device)
    assert node.run(torch.sum, x).item() == 3  # the first one brings the program's modules, and waits
    last = keep_busy(device)
    call = node.submit(torch.sum, x)
    doomed = node.submit(torch.sum, last)
    torch.sky.cancel(device)
    assert call.result().item() == 3
    with pytest.raises(CancelledOperationError):
        doomed.result()


def test_over_a_connection_that_is_made_anew(sky: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent again after a cancellation is dropped as well, and nothing is executed twice."""
    lasting = dataclasses.replace(SETTINGS, reconnect=True, reconnect_seconds=60.0)
    monkeypatch.setattr(nodes, "SETTINGS", lasting)
    with worker(tmp_path) as (url, token), chaos_proxy(int(url.rpartition(":")[2])) as proxy:
        with skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=token) as node:
            device = node.devices[0]
            counter = torch.zeros(3, device=device)
            for _ in range(5):
                counter += 1
            node.synchronize()
            last = keep_busy(device)
            proxy.turn_away(True)
            proxy.cut()
            for _ in range(5):
                counter += 1
            torch.sky.cancel(device)
            proxy.turn_away(False)
            counter_after = counter + 0
            assert refuses(counter_after)
            assert refuses(last)
            assert counter.tolist() == [5, 5, 5]
            counter += 1
            proxy.cut()
            assert counter.tolist() == [6, 6, 6]


@pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux")
def test_in_a_session_with_a_process_of_its_own(sky: str, tmp_path: Path) -> None:
    with worker(tmp_path, "--session-processes") as (url, token), skyproxy.connect(url, token=token) as node:
        node._session.cancels_on_interrupt = True
        last = keep_busy(node.devices[0])
        with interrupt_once_it_waits(), pytest.raises(KeyboardInterrupt):
            last.sum().item()
        assert torch.ones(2, device=node.devices[0]).sum().item() == 2
        assert refuses(last)


# --- interrupts at any moment ----------------------------------------------------------------------------------------


class _Training:
    """A small network that is trained; whatever interrupts it."""

    def __init__(self, device: torch.device) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.data = torch.ones(512, 32, device=device)

    def run(self) -> None:
        for step in range(10_000):
            self.optimizer.zero_grad()
            loss = self.model(self.data).square().mean()
            loss.backward()
            self.optimizer.step()
            if step % 20 == 19:
                loss.item()


def settled(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what `read` gives; it may raise once for each change that was cancelled.

    There may be two: an update whose momentum an earlier interrupt had cancelled, and one that this interrupt did.
    """
    for _ in range(2):
        with contextlib.suppress(CancelledOperationError):
            return read()
    return read()


def interrupt_at(moments: random.Random, action: Callable[[], None]) -> None:
    """Run an action that a SIGINT ends after 0 to 60 ms."""
    begun = threading.Event()

    def strike() -> None:
        begun.wait()
        threading.Event().wait(moments.random() * 0.06)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            begun.set()
            action()
            thread.join()
        finally:
            thread.join()


def test_forty_interrupts_of_a_training_leave_a_working_session(node: skyproxy.Node) -> None:
    device, moments = node.devices[0], random.Random(7)
    untouched = torch.rand(100, device=device)
    before = untouched.cpu()
    training = _Training(device)
    for number in range(40):
        interrupt_at(moments, training.run)
        assert torch.ones(2, device=device).sum().item() == 2
        assert torch.equal(untouched.cpu(), before)
        training.optimizer.zero_grad()
        for parameter in training.model.parameters():
            assert settled(parameter.detach().cpu).isfinite().all(), number
        if number % 10 == 9:
            training.optimizer.state.clear()  # of an interrupted step, it may never have been made
            training.model(training.data).sum().backward()
    del training, parameter
    gc.collect()
    session = node._session
    node.synchronize()
    node.synchronize()
    assert session.call("stats")["handles"] < 40
    assert session.recorder.live_slots < 40
    assert not session.cancelling._open
    assert session.recorder._acked.maxlen is not None
