"""What is wrong with a call is said at its line, in PyTorch's words; and connections that cannot come about say why."""

from __future__ import annotations

import socket
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    UnsupportedOpError,
    VersionMismatchError,
)
from skyproxy.protocol.messages import WORKER, Hello
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.transport.stream import PlainStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from tests.integration.programs import worker
from tests.integration.unseen_errors import drain

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
    "nonzero of a range": lambda d: torch.ones(3, device=d)[torch.full((1,), 9, device=d)].cpu(),
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


def test_nobody_listens_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectError, match="nothing listens on port") as caught:
            skyproxy.connect(url, token="t" * 40)
        assert len(traceback.extract_tb(caught.value.__traceback__)) == 2, "this line, and connect"
        cause = caught.value.__cause__
        assert isinstance(cause, OSError)
        assert cause.__traceback__ is None
        with pytest.raises(ConnectionError):
            skyproxy.connect(url, token="t" * 40)


def test_a_token_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the token is no text but"):
        skyproxy.connect("ws://127.0.0.1:1", token=Path("token"))  # type: ignore[arg-type]


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
        assert len(skyproxy.devices()) == before
        with skyproxy.connect(url, token=token) as node:
            assert torch.ones(2, device=node.devices[0]).sum().item() == 2
    assert token not in (tmp_path / "worker.log").read_text()


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
