"""What fails on the worker fails here as PyTorch users expect, names their line, and harms nothing else."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.errors import ConnectError, LimitExceededError, RemoteError, UnknownDeviceError, UnsupportedOpError
from skyproxy.protocol.messages import Failure, RequestId
from skyproxy.session.failures import remote_error
from skyproxy.tensor.core.devices import DEVICES
from tests.integration.unseen_errors import drain

HERE = Path(__file__).name


TOO_MUCH = 1 << 50
"""More bytes than any machine's allocator gives."""


def line() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


@pytest.fixture(autouse=True)
def nothing_is_left(sky: str) -> Iterator[None]:
    """Each test starts and ends without errors that nobody saw."""
    drain(sky)
    yield
    drain(sky)


def bad_lookup(device: str) -> torch.Tensor:
    """Fails on the worker only: nobody here knows that an index is out of range which was not uploaded."""
    return nn.functional.embedding(torch.full((1,), 7, device=device), torch.zeros(3, 2, device=device))


def test_the_error_comes_when_a_value_is_asked_for_and_is_the_local_class(sky: str) -> None:
    out = bad_lookup(sky)
    assert out.shape == (1, 2)
    with pytest.raises(IndexError) as caught:
        out.cpu()
    with pytest.raises(IndexError) as local:
        bad_lookup("cpu")
    assert isinstance(caught.value, RemoteError)
    assert str(local.value) in str(caught.value)


def test_the_error_names_op_line_and_worker_stack(sky: str) -> None:
    weights = torch.zeros(3, 2, device=sky)
    index = torch.full((1,), 7, device=sky)
    at = line() + 1
    out = nn.functional.embedding(index, weights)
    with pytest.raises(RemoteError) as caught:
        out.sum().item()
    error = caught.value
    assert error.op == "aten::embedding"
    assert "aten::embedding" in str(error)
    assert f"{HERE}:{at}" in str(error)
    assert error.user_line.endswith(f"{HERE}:{at} in {inspect.currentframe().f_code.co_name}")  # type: ignore[union-attr]
    assert "IndexError" in error.remote_traceback
    assert not hasattr(error, "__notes__"), "what leads to a kernel of PyTorch says nothing to the user"


def ours(error: BaseException) -> list[str]:
    """The frames of skyproxy that an error came through."""
    own = os.path.dirname(skyproxy.__file__)
    return [row.name for row in traceback.extract_tb(error.__traceback__) if row.filename.startswith(own)]


MISTAKES: dict[str, Callable[[str], object]] = {
    "shapes": lambda on: torch.ones(3, 4, device=on) @ torch.ones(3, 4, device=on),
    "sizes": lambda on: torch.ones(3, device=on) + torch.ones(5, device=on),
    "dtypes": lambda on: torch.dot(torch.ones(3, device=on), torch.ones(3, device=on).long()),
    "views": lambda on: torch.ones(3, 4, device=on).t().view(12),
    "an item": lambda on: bad_lookup(on).sum().item(),
    "values": lambda on: bad_lookup(on).cpu(),
    "a list": lambda on: bad_lookup(on).tolist(),
    "an array": lambda on: bad_lookup(on).numpy(force=True),
    "printed": lambda on: repr(bad_lookup(on)),
    "a singular matrix": lambda on: torch.linalg.inv(torch.zeros(2, 2, device=on)),
    "an index": lambda on: torch.ones(3, device=on)[torch.tensor([9], device=on)],
    "a label": lambda on: nn.functional.cross_entropy(torch.ones(1, 3, device=on), torch.tensor([9], device=on)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_traceback_ends_near_the_users_line(sky: str, mistake: str) -> None:
    with pytest.raises(RemoteError) as caught:
        MISTAKES[mistake](sky)
    assert len(ours(caught.value)) <= 2
    assert not hasattr(caught.value, "__notes__")


ACROSS_DEVICES: dict[str, Callable[[str], object]] = {
    "a sum": lambda on: torch.ones(3, device=on) + torch.ones(3),
    "a batch on the CPU": lambda on: nn.Linear(3, 4).to(on)(torch.ones(2, 3)),
    "a model on the CPU": lambda on: nn.Linear(3, 4)(torch.ones(2, 3, device=on)),
    "in place": lambda on: torch.ones(3).add_(torch.ones(3, device=on)),
}


@pytest.mark.parametrize("mistake", ACROSS_DEVICES)
def test_the_traceback_of_mixed_devices_ends_near_the_users_line(sky: str, mistake: str) -> None:
    with pytest.raises(RuntimeError, match="same device") as caught:
        ACROSS_DEVICES[mistake](sky)
    assert type(caught.value) is RuntimeError
    assert len(ours(caught.value)) <= 2


FIRST_LINES: dict[str, Callable[[str], object]] = {
    "to": lambda on: torch.ones(3).to(on),
    "zeros": lambda on: torch.zeros(3, device=on),
    "tensor": lambda on: torch.tensor([1.0, 2.0], device=on),
    "as_tensor": lambda on: torch.as_tensor([1.0, 2.0], device=on),
    "randn": lambda on: torch.randn(3, device=on),
}


@pytest.fixture
def wrapped(sky: str, sky1: str) -> None:
    """PyTorch's functions for tensors are wrapped, as where another device than the first was current once."""
    with torch.sky.device(sky1):
        pass


@pytest.mark.parametrize("first", FIRST_LINES)
def test_a_device_that_is_not_there_is_told_at_the_users_line(sky: str, wrapped: None, first: str) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        FIRST_LINES[first]("sky:77")
    assert ours(caught.value) == []


@pytest.mark.parametrize("first", FIRST_LINES)
def test_a_worker_that_cannot_be_had_is_told_at_the_users_line(
    sky: str, wrapped: None, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(DEVICES, "_devices", [])
    monkeypatch.setattr(DEVICES, "start_default", unreachable)
    with pytest.raises(ConnectError) as caught:
        FIRST_LINES[first]("sky:0")
    assert ours(caught.value) == []


def unreachable() -> None:
    raise ConnectError("nobody answers there")


def test_what_asks_for_devices_does_not_show_how_a_worker_was_looked_for(
    sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DEVICES, "_devices", [])
    monkeypatch.setattr(DEVICES, "start_default", unreachable)
    with pytest.raises(ConnectError) as caught:
        torch.sky.device_count()
    assert ours(caught.value) == ["device_count", "at"]


def test_only_what_depends_on_it_is_poisoned(sky: str) -> None:
    before = torch.arange(3.0, device=sky)
    bad = bad_lookup(sky)
    derived = (bad * 2).relu() + before.sum()
    after = torch.arange(4.0, device=sky) + before.sum()
    with pytest.raises(IndexError):
        derived.cpu()
    assert before.tolist() == [0, 1, 2]
    assert after.tolist() == [3, 4, 5, 6]
    with pytest.raises(IndexError):
        bad.cpu()


def test_batch_mates_of_a_failing_op_are_unharmed(sky: str) -> None:
    values = [torch.full((2,), float(i), device=sky) for i in range(30)]
    bad = [bad_lookup(sky) for _ in range(3)]
    more = [value + 1 for value in values]
    assert [m.tolist() for m in more] == [[i + 1.0] * 2 for i in range(30)]
    for item in bad:
        with pytest.raises(IndexError):
            item.cpu()


def test_synchronize_raises_an_error_that_nobody_saw_and_only_once(sky: str) -> None:
    del_me = bad_lookup(sky)
    del del_me
    with pytest.raises(IndexError, match=HERE):
        torch.sky.synchronize(sky)
    torch.sky.synchronize(sky)


def test_an_error_that_was_seen_is_not_raised_by_synchronize(sky: str) -> None:
    bad = bad_lookup(sky)
    with pytest.raises(IndexError):
        bad.cpu()
    torch.sky.synchronize(sky)


def test_several_outputs_are_poisoned_together(sky: str) -> None:
    parts = torch.linalg.qr(bad_lookup(sky))
    chunks = bad_lookup(sky).unbind(1)
    for part in (*parts, *chunks):
        with pytest.raises(IndexError):
            part.cpu()


def test_printing_a_poisoned_tensor_raises_the_error(sky: str) -> None:
    with pytest.raises(IndexError):
        repr(bad_lookup(sky))


def test_views_of_a_poisoned_tensor_are_poisoned(sky: str) -> None:
    bad = bad_lookup(sky)
    with pytest.raises(IndexError):
        bad[0, 1].item()
    with pytest.raises(IndexError):
        bad.t().tolist()


def test_a_failed_change_is_not_passed_over_and_the_former_value_comes_back(sky: str) -> None:
    target = torch.tensor([1.0, 2.0], device=sky)
    target.add_(bad_lookup(sky)[0])
    with pytest.raises(IndexError):
        target.cpu()
    assert target.tolist() == [1.0, 2.0]
    target.add_(1)
    assert target.tolist() == [2.0, 3.0]


def test_views_of_a_target_are_marked_too(sky: str) -> None:
    base = torch.zeros(2, 3, device=sky)
    row = base[1]
    row.index_add_(0, torch.full((1,), 9, device=sky), torch.ones(1, device=sky))
    with pytest.raises(IndexError):
        base.sum().item()
    assert base.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert row.tolist() == [0, 0, 0]


def test_what_was_computed_from_a_failed_change_is_poisoned_for_good(sky: str) -> None:
    target = torch.zeros(2, device=sky)
    target.add_(bad_lookup(sky)[0])
    derived = target + 1
    with pytest.raises(IndexError):
        derived.cpu()
    with pytest.raises(IndexError):
        derived.cpu()
    assert (target + 1).tolist() == [1, 1]


def test_a_training_step_that_failed_can_be_repeated(sky: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)).to(sky)
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))

    def step(m: nn.Module, tokens: list[int], where: str) -> torch.Tensor:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss = m(torch.tensor([tokens], device=where) + 0).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for tokens in ([1, 2], [0, 4]):
        torch.testing.assert_close(step(model, tokens, sky).cpu(), step(twin, tokens, "cpu"))
    with pytest.raises(IndexError):
        step(model, [1, 99], sky).item()
    for tokens in ([3, 2], [0, 1]):
        torch.testing.assert_close(step(model, tokens, sky).cpu(), step(twin, tokens, "cpu"))


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.line = line() + 1
        return nn.functional.embedding(x, torch.zeros(3, 2, device=x.device))


def test_the_line_is_the_one_inside_forward(sky: str) -> None:
    model = Broken()
    wrapped = nn.Sequential(nn.Identity(), model)
    with pytest.raises(IndexError, match=r" in forward") as caught:
        wrapped(torch.full((1,), 5, device=sky)).cpu()
    assert f"{HERE}:{model.line} in forward" in str(caught.value)


class BadBackward(torch.autograd.Function):
    line = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        bad = torch.full((1,), 9, device=grad.device)
        BadBackward.line = line() + 1
        return grad + nn.functional.embedding(bad, torch.zeros(3, 2, device=grad.device))


def test_the_line_is_the_one_inside_a_backward_of_ours(sky: str, sky1: str) -> None:
    for device in (sky, sky1):
        x = torch.ones(1, 2, device=device, requires_grad=True)
        BadBackward.apply(x).sum().backward()
        with pytest.raises(IndexError) as caught:
            x.grad.cpu()  # type: ignore[union-attr]
        assert f"{HERE}:{BadBackward.line} in backward" in str(caught.value)


def test_an_op_of_the_engine_is_recorded_at_the_line_that_calls_backward(sky: str) -> None:
    x = torch.ones(2, 2, device=sky, requires_grad=True)
    y = x * x
    # The gradient has the right shape and depends on a value that does not exist.
    gradient = bad_lookup(sky).expand(2, 2)
    torch.autograd.backward(y, gradient)
    with pytest.raises(IndexError, match=HERE):
        x.grad.cpu()  # type: ignore[union-attr]


def test_an_error_of_a_hook_comes_out_of_backward_unchanged(sky: str, sky1: str) -> None:
    class Unusual(Exception):
        pass

    def hook(grad: torch.Tensor) -> None:
        raise Unusual

    for device in (sky, sky1):
        x = torch.ones(2, device=device, requires_grad=True)
        x.register_hook(hook)
        with pytest.raises(Unusual):
            (x * 2).sum().backward()
        assert (x.detach() + 1).tolist() == [2, 2]


def test_out_of_memory_poisons_and_the_session_goes_on(sky: str) -> None:
    kept = torch.arange(4.0, device=sky)
    huge = torch.empty(TOO_MUCH, device=sky)
    also = huge + 1
    with pytest.raises(RuntimeError, match="memory") as caught:
        also.sum().item()
    assert isinstance(caught.value, RemoteError)
    assert HERE in str(caught.value)
    del huge, also
    torch.sky.synchronize(sky)
    assert kept.tolist() == [0, 1, 2, 3]
    assert torch.ones(1 << 20, device=sky).sum().item() == 1 << 20


def test_an_upload_for_which_the_worker_has_no_memory_fails_alone(sky: str) -> None:
    session = DEVICES.of(sky).session
    # What a client sends whose tensor is larger than the worker's memory: the announcement, and a first piece.
    from skyproxy.protocol import commands
    from skyproxy.protocol.messages import Chunk

    chosen = DEVICES.of(sky)
    number = session._waiters.next_number()
    handle = chosen.new_handle(None)
    session._bulk.send(Chunk(number, 0, TOO_MUCH, (b"first",)))
    chosen.recorder.append(commands.RECEIVE, handle.slot, ["uint8", [TOO_MUCH], [1], 0], chosen.place, number)
    with pytest.raises(RuntimeError, match="memory"):
        torch.sky.synchronize(sky)
    del handle
    assert (torch.ones(300_000).to(sky) + 1).sum().item() == 600_000


def failed(type_name: str, text: str = "text") -> dict[str, Any]:
    return {"type": type_name, "message": text, "traceback": "", "op": "", "sequence": 0, "position": 0}


@pytest.mark.parametrize(
    ("type_name", "expected"),
    [
        ("OutOfMemoryError", torch.OutOfMemoryError),
        ("_LinAlgError", torch.linalg.LinAlgError),
        ("UnsupportedOpError", UnsupportedOpError),
        ("LimitExceededError", LimitExceededError),
        ("NotImplementedError", NotImplementedError),
        ("ValueError", ValueError),
        ("TypeError", TypeError),
        ("KeyError", KeyError),
        ("UnicodeDecodeError", RemoteError),  # its constructor wants five arguments
        ("KeyboardInterrupt", RuntimeError),
        ("print", RuntimeError),
        ("NeverHeardOf", RuntimeError),
    ],
)
def test_each_class_of_error_is_known_here(sky: str, type_name: str, expected: type[Exception]) -> None:
    session = DEVICES.of(sky).session
    number, waiter = session._waiters.open()
    session._on_failure(Failure(RequestId(number), failed(type_name)))
    with pytest.raises(expected, match="text") as caught:
        waiter.wait()
    assert isinstance(caught.value, RemoteError)
    session._failures.lines.clear()


def test_a_workers_traceback_is_printed_where_it_says_more_than_that_a_kernel_refused() -> None:
    frame = 'Traceback (most recent call last):\n  File "/opt/skyproxy_server/op_table.py", line 98, in handler\n'
    kernel = frame + '  File "<skyproxy aten::index.Tensor>", line 2, in handler\nIndexError: no'
    own = kernel.replace("IndexError", '  File "/home/me/ops.py", line 7, in mine\n    raise IndexError\nIndexError')
    for text, is_printed in ((kernel, False), (own, True), (frame + "IndexError: no", True), ("", False)):
        error = remote_error({"type": "IndexError", "message": "no", "op": "aten::index", "traceback": text}, "")
        assert error.remote_traceback == text
        assert hasattr(error, "__notes__") is is_printed
