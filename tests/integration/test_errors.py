"""What fails on the worker fails here as PyTorch users expect, names their line, and harms nothing else."""

from __future__ import annotations

import inspect
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    LimitExceededError,
    RemoteError,
    SessionLostError,
    UnsupportedOpError,
    VersionMismatchError,
)
from skyproxy.protocol.messages import WORKER, Batch, Failure, Goodbye, Hello, RequestId, Sequence
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.transport.stream import PlainStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from tests.integration.programs import worker

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


def drain(device: str) -> None:
    for _ in range(200):
        try:
            torch.sky.synchronize(device)
            return
        except RemoteError:
            continue
    raise AssertionError("errors without end")


def bad_lookup(device: str) -> torch.Tensor:
    """Fails on the worker only: no shape tells that an index is out of range."""
    return nn.functional.embedding(torch.tensor([7], device=device), torch.zeros(3, 2, device=device))


# --- poison ----------------------------------------------------------------------------------------------------------


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
    index = torch.tensor([7], device=sky)
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
    assert any(error.remote_traceback.rstrip() in note for note in error.__notes__)


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


# --- changes that failed ---------------------------------------------------------------------------------------------


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
    row.index_add_(0, torch.tensor([9], device=sky), torch.ones(1, device=sky))
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
        loss = m(torch.tensor([tokens], device=where)).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for tokens in ([1, 2], [0, 4]):
        torch.testing.assert_close(step(model, tokens, sky).cpu(), step(twin, tokens, "cpu"))
    with pytest.raises(IndexError):
        step(model, [1, 99], sky).item()
    for tokens in ([3, 2], [0, 1]):
        torch.testing.assert_close(step(model, tokens, sky).cpu(), step(twin, tokens, "cpu"))


# --- lines -----------------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.line = line() + 1
        return nn.functional.embedding(x, torch.zeros(3, 2, device=x.device))


def test_the_line_is_the_one_inside_forward(sky: str) -> None:
    model = Broken()
    wrapped = nn.Sequential(nn.Identity(), model)
    with pytest.raises(IndexError, match=r" in forward") as caught:
        wrapped(torch.tensor([5], device=sky)).cpu()
    assert f"{HERE}:{model.line} in forward" in str(caught.value)


class BadBackward(torch.autograd.Function):
    line = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        bad = torch.tensor([9], device=grad.device)
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


# --- out of memory ---------------------------------------------------------------------------------------------------


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


# --- errors at the line itself ---------------------------------------------------------------------------------------


WRONG: dict[str, Callable[[str], object]] = {
    "matmul shapes": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "broadcast": lambda d: torch.ones(2, device=d) + torch.ones(3, device=d),
    "dim": lambda d: torch.ones(2, device=d).sum(5),
    "view": lambda d: torch.ones(6, device=d).view(4, 2),
    "cat": lambda d: torch.cat([torch.ones(2, 2, device=d), torch.ones(3, 3, device=d)]),
    "dtype of matmul": lambda d: (torch.ones(2, 2, device=d) @ torch.ones(2, 2, device=d, dtype=torch.float64)).cpu(),
    "index dtype": lambda d: torch.ones(3, device=d).gather(0, torch.ones(3, device=d)),
    "in-place broadcast": lambda d: torch.ones(2, device=d).add_(torch.ones(3, 2, device=d)),
    "result dtype": lambda d: torch.ones(2, device=d, dtype=torch.int64).add_(0.5),
    "linear": lambda d: nn.functional.linear(torch.ones(2, 3, device=d), torch.ones(4, 5, device=d)),
    "conv": lambda d: nn.functional.conv2d(torch.ones(1, 3, 8, 8, device=d), torch.ones(2, 4, 3, 3, device=d)),
    "cross entropy": lambda d: nn.functional.cross_entropy(
        torch.ones(2, 3, device=d), torch.ones(4, device=d, dtype=torch.int64)
    ),
    "item of many": lambda d: torch.ones(3, device=d).item(),
    "bool of many": lambda d: bool(torch.ones(3, device=d)),
    "leaf in place": lambda d: torch.ones(2, device=d, requires_grad=True).add_(1),
    "backward of many": lambda d: (torch.ones(2, device=d, requires_grad=True) * 2).backward(),
    "integer index": lambda d: torch.ones(3, device=d)[5],
    "nonzero of a range": lambda d: torch.ones(3, device=d)[torch.tensor([9], device=d)].cpu(),
    "svd of a vector": lambda d: torch.linalg.svd(torch.ones(3, device=d)),
    "cholesky": lambda d: torch.linalg.cholesky(torch.zeros(2, 2, device=d)).cpu(),
    "inverse": lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)).cpu(),
    "overflow": lambda d: torch.ones(2, device=d) + (1 << 70),
    "negative size": lambda d: torch.empty(-1, device=d),
    "arange": lambda d: torch.arange(3, 1, 1, device=d),
    "bernoulli": lambda d: torch.bernoulli(torch.full((2,), 3.0, device=d)).cpu(),
    "unique of a dim": lambda d: torch.unique(torch.ones(2, device=d), dim=3),
    "masked select": lambda d: torch.ones(3, device=d)[torch.ones(4, device=d, dtype=torch.bool)],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_what_pytorch_raises(sky: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as local:
            WRONG[name]("cpu")
        with pytest.raises(type(local.value)) as remote:
            WRONG[name](sky)
    first = str(local.value).splitlines()[0]
    assert first.replace("cpu", "") in str(remote.value).replace(sky, "").replace("cpu", "")
    torch.sky.synchronize(sky)


def test_mixing_devices_raises_pytorchs_error(sky: str, sky1: str) -> None:
    a, b, c = torch.ones(2, device=sky), torch.ones(2, device=sky1), torch.ones(2)
    calls: list[Callable[[], object]] = [
        lambda: a + b,
        lambda: a + c,
        lambda: c + a,
        lambda: a @ c,
        lambda: torch.cat([a, b]),
        lambda: torch.cat([a, c]),
        lambda: torch.stack([c, a]),
        lambda: a.add_(c),
        lambda: c.add_(a),
        lambda: torch.where(a > 0, a, c),
        lambda: nn.Linear(2, 2)(a),
        lambda: torch._foreach_add([a, a], [b, b]),
    ]
    for wrong in calls:
        with pytest.raises(RuntimeError, match=r"same device.*found at least two devices"):
            wrong()
    # A CPU scalar may stand among tensors of any device.
    assert (a + torch.tensor(2.0)).tolist() == [3, 3]
    assert (torch.tensor(2.0) * a).tolist() == [2, 2]


def test_an_unknown_device_index_is_a_clear_error(sky: str) -> None:
    for use in (
        lambda: torch.ones(2, device="sky:99"),
        lambda: torch.ones(2).to("sky:99"),
        lambda: torch.ones(2, device=sky).to("sky:99"),
        lambda: torch.sky.set_device(99),
        lambda: torch.sky.get_device_name(99),
        lambda: nn.Linear(2, 2).to("sky:99"),
    ):
        with pytest.raises(ConfigurationError, match=r"no sky:99; this process has sky:0 .*launch_local"):
            use()


def test_an_op_that_must_not_run_is_refused_with_a_way_out(sky: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOpError, match="from_file"):
        torch.ops.aten.from_file(str(tmp_path / "x"), False, 4, device=torch.device(sky))
    assert isinstance(UnsupportedOpError("x"), NotImplementedError)
    assert torch.ones(2, device=sky).tolist() == [1, 1]


def test_an_op_that_the_worker_does_not_know_fails_alone(sky: str) -> None:
    with torch.library._scoped_library("skytest", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        library.impl("double", lambda x: torch.empty_like(x), "Meta")
        x = torch.ones(2, device=sky)
        with pytest.raises(NotImplementedError, match="skytest::double"):
            torch.ops.skytest.double(x).cpu()
        assert (x + 1).tolist() == [2, 2]
    drain(sky)


def test_an_argument_that_cannot_travel_is_refused_at_the_line(sky: str) -> None:
    x = torch.ones(2, device=sky)
    session = DEVICES.of(sky).session
    from skyproxy.tensor.dispatch.recording import dispatch

    for foreign in (object(), {1: 2}, b"bytes"):
        with pytest.raises(UnsupportedOpError, match="cannot be sent to a worker"):
            dispatch(torch.ops.aten.add.Scalar, (x, foreign), {})
    assert session.lost is None
    assert (x + 1).tolist() == [2, 2]


# --- connecting ------------------------------------------------------------------------------------------------------


def test_nobody_listens_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectError, match="nothing listens on port"):
            skyproxy.connect(url, token="t" * 40)
        with pytest.raises(ConnectionError):
            skyproxy.connect(url, token="t" * 40)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "ws://", "ws://user:secret@127.0.0.1:1"])
def test_a_url_that_cannot_work_says_what_would(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        skyproxy.connect(url, token="t" * 40)
    assert "secret@" not in str(caught.value)


def test_a_missing_token_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYPROXY_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match="SKYPROXY_TOKEN"):
        skyproxy.connect("ws://127.0.0.1:1")


def test_a_wrong_token_is_refused_and_not_shown(tmp_path: Path) -> None:
    before = len(skyproxy.devices())
    with worker(tmp_path) as (url, token):
        with pytest.raises(AuthenticationError) as caught:
            skyproxy.connect(url, token="wrong-" + token)
        assert token not in str(caught.value)
        with skyproxy.connect(url, token=token) as node:
            assert torch.ones(2, device=node.devices[0]).sum().item() == 2
    assert token not in (tmp_path / "worker.log").read_text()
    assert len(skyproxy.devices()) == before + 1


class OldWorker:
    """Accepts one connection and says that it speaks another protocol version."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        import time

        from skyproxy_server.auth import TokenCheck
        from skyproxy_server.upgrade import Upgrader

        sock, _ = self._listening.accept()
        stream = PlainStream(sock)
        upgrader = Upgrader(TokenCheck("t" * 40), (), is_ready=lambda: True, activity=dict, pause=lambda seconds: None)
        received = upgrader.upgrade(stream, "peer", time.monotonic() + 10)
        transport = WebSocketTransport(stream, WORKER, SETTINGS, received or b"")
        assert isinstance(transport.recv(10), Hello)
        transport.close("version", "The worker speaks protocol version 99, the client 1. Update the client.")

    def close(self) -> None:
        self._thread.join(20)
        self._listening.close()


def test_a_worker_of_another_version_is_named() -> None:
    old = OldWorker()
    try:
        with pytest.raises(VersionMismatchError, match=r"version 99.*Update the client"):
            skyproxy.connect(old.url, token="t" * 40)
    finally:
        old.close()


# --- a peer that breaks the rules ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with worker(tmp_path_factory.mktemp("worker")) as place:
        yield place


@pytest.fixture
def intruder(shared_worker: tuple[str, str]) -> Iterator[tuple[skyproxy.Node, skyproxy.Node]]:
    """Two clients of one worker; the first will misbehave."""
    url, token = shared_worker
    with skyproxy.connect(url, token=token) as bad, skyproxy.connect(url, token=token) as good:
        yield bad, good


STREAMS: dict[str, list[Any]] = {
    "an op that was never defined": [4711, 1, 2],
    "a command that does not exist": [17],
    "a negative number": [-5, 1],
    "no number": ["add", 1],
    "a cut command": [5, 1],
    "EXPECT before nothing": [2, []],
    "EXPECT before no op": [2, [], 3, [1]],
    "a definition out of order": [1, 999, ["aten::relu", ["t"], {}, ["n"]]],
    "a malformed definition": [1, 32, "aten::relu"],
    "an unknown template": [1, 32, ["aten::relu", ["?"], {}, ["n"]]],
    "too many arguments": [1, 32, ["aten::relu", ["t"] * 9, {}, ["n"]]],
    "another number of results": [1, 32, ["aten::relu", ["t"], {}, ["n", "n"]]],
    "an unknown control": [9, "no_such_control", []],
    "an upload without bytes": [4, 1, ["float32", [2], [1], 0], ["cpu", None]],
    "a dtype that does not exist": [4, 1, ["float33", [2], [1], 0], ["cpu", None]],
    "a slot that holds nothing": [6, 1, 31337, 0],
}


@pytest.mark.parametrize("name", STREAMS)
def test_malformed_commands_end_that_session_only(intruder: tuple[skyproxy.Node, skyproxy.Node], name: str) -> None:
    bad, good = intruder
    kept = torch.arange(3.0, device=good.devices[0])
    bad.synchronize()
    session = bad._session
    session.recorder.stream.extend(STREAMS[name])
    with pytest.raises(SessionLostError):
        session.recorder.flush()
        bad.synchronize()
    assert (kept + 1).tolist() == [1, 2, 3]
    assert good.alive


def test_a_batch_out_of_order_ends_that_session_only(intruder: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    bad, good = intruder
    kept = torch.arange(3.0, device=good.devices[0])
    bad.synchronize()
    transport = bad._session._operations
    wrong = Batch(Sequence(bad._session.recorder.batches + 7), [])
    # Past our own rules, as a broken client would.
    from skyproxy.protocol import framing

    frame = transport._frame(framing.encode(wrong, SETTINGS.max_frame_bytes))  # type: ignore[attr-defined]
    transport._outbox.post(frame)  # type: ignore[attr-defined]
    with pytest.raises(SessionLostError, match="none may be missing"):
        bad.synchronize()
        bad.synchronize()
    assert (kept + 1).tolist() == [1, 2, 3]


def test_an_oversized_frame_ends_that_session_only(intruder: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    bad, good = intruder
    kept = torch.arange(3.0, device=good.devices[0])
    bad.synchronize()
    from skyproxy.transport import websocket_frames as ws
    from skyproxy.transport.outbox import Frame

    header = ws.frame_header(ws.BINARY, SETTINGS.max_frame_bytes + 1, b"abcd")
    bad._session._operations._outbox.post(Frame([header], len(header)))  # type: ignore[attr-defined]
    with pytest.raises(SessionLostError):
        bad.synchronize()
        bad.synchronize()
    assert (kept + 1).tolist() == [1, 2, 3]


def test_garbage_on_the_bulk_connection_ends_that_session_only(intruder: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    bad, good = intruder
    kept = torch.arange(3.0, device=good.devices[0])
    bad.synchronize()
    transport = bad._session._bulk
    transport._outbox.post(transport._small_frame(2, b"\x00" * 64))  # type: ignore[attr-defined]
    with pytest.raises(SessionLostError):
        for _ in range(1000):
            bad.synchronize()
    assert (kept + 1).tolist() == [1, 2, 3]


def test_a_goodbye_of_the_worker_is_the_reason_that_users_see(intruder: tuple[skyproxy.Node, skyproxy.Node]) -> None:
    bad, _ = intruder
    bad.synchronize()
    bad._session._on_goodbye(Goodbye("shutdown", "The worker is shutting down."))
    with pytest.raises(SessionLostError, match=r"shutting down.*tensors on the CPU are unharmed"):
        bad.synchronize()
