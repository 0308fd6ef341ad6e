"""Large tensors over real links: compressed on slow ones only, together where they can be, within bounded memory."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.node import Node
from skyproxy.protocol.messages import PackedChunk
from skyproxy.session.local_worker import LocalWorker
from skyproxy.session.session import Session
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.torch_codec import byte_view

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
HelperProcess = importlib.import_module("_helper_process").HelperProcess

MIB = 1 << 20
MBIT = 40.0


class Link(NamedTuple):
    """A worker that can be reached only through a link of `MBIT` in either direction."""

    device: str
    session: Session
    process_id: int


def session_of(node: Node) -> Session:
    return node._session


@pytest.fixture(scope="module")
def slow_link(sky_devices: tuple[str, str]) -> Iterator[Link]:
    worker = LocalWorker("cpu", SETTINGS)
    proxy: Any = None
    try:
        target = worker.url.removeprefix("ws://")
        proxy = HelperProcess("delay_proxy.py", "--to", target, "--mbit-up", str(MBIT), "--mbit-down", str(MBIT))
        node = skyproxy.connect(f"ws://127.0.0.1:{proxy.announced['ports'][0]}", token=worker.token)
        yield Link(str(node.devices[0]), session_of(node), worker.process_id)
        node.close()
    finally:
        worker.stop()
        if proxy is not None:
            proxy.close()


@pytest.fixture
def uploads(slow_link: Link) -> Any:
    return slow_link.session._uploads.writer


def weights(mib: int) -> torch.Tensor:
    return torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(mib)) * 0.02


def noise(mib: int) -> torch.Tensor:
    return torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(mib))


def test_weights_pass_a_slow_link_faster_than_their_size_allows_both_ways(slow_link: Link, uploads: Any) -> None:
    """What the link carries is what takes the time: its rate is fixed, so the bytes are compared, and not the clock."""
    session = slow_link.session
    source = weights(24)
    before, sent = uploads.packed_chunks, session.bytes_sent
    remote = source.to(slow_link.device)
    assert uploads.packed_chunks - before >= 6
    assert session.bytes_sent - sent < 0.95 * source.nbytes
    before, received = session._downloads.packed_chunks, session.bytes_received
    back = remote.cpu()
    assert torch.equal(back.view(torch.int32), source.view(torch.int32))
    assert session._downloads.packed_chunks - before >= 6
    assert session.bytes_received - received < 0.95 * source.nbytes


def test_noise_passes_a_slow_link_as_it_is(slow_link: Link, uploads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = importlib.import_module("skyproxy.transport.packing")
    spent: list[float] = []

    def timed(piece: memoryview, width: int) -> bytes | None:
        started = time.thread_time()
        try:
            return plain(piece, width)
        finally:
            spent.append(time.thread_time() - started)

    plain = packing.pack
    monkeypatch.setattr(packing, "pack", timed)
    source = noise(16)
    before, attempts = uploads.packed_chunks, uploads.attempts
    started = time.monotonic()
    remote = source.to(slow_link.device)
    took = time.monotonic() - started
    assert uploads.packed_chunks == before
    assert uploads.attempts - attempts == len(spent) <= 2
    assert sum(spent) < 0.1 * took
    monkeypatch.undo()
    assert int(remote.sum()) == int(source.sum())


DTYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.int32, torch.float64, torch.complex128]


def test_every_width_comes_back_bit_for_bit(slow_link: Link, uploads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_slow", [1e-3])  # a link that takes minutes for a MiB
    monkeypatch.setattr(uploads, "_packs_until", time.monotonic() + 600)
    before = uploads.packed_chunks
    for dtype in DTYPES:
        source = (torch.randn(100_003, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
        back = source.to(slow_link.device).cpu()
        assert bytes(byte_view(back)) == bytes(byte_view(source)), dtype
    assert uploads.packed_chunks - before >= len(DTYPES)


def test_loopback_never_compresses(sky: str) -> None:
    session = DEVICES.of(sky).session
    source = torch.zeros(16 * MIB)
    for _ in range(2):
        source.to(sky).cpu()
    assert session._uploads.writer.attempts == 0
    assert session._uploads.writer.packed_chunks == 0
    assert session._downloads.packed_chunks == 0


def test_a_malformed_packed_chunk_ends_the_session_and_not_the_worker() -> None:
    worker = LocalWorker("cpu", SETTINGS)
    try:
        node = skyproxy.connect(worker.url, token=worker.token)
        session = session_of(node)
        number = session._waiters.next_number()
        session._bulk.send(PackedChunk(number, 0, 1 << 20, 1 << 20, 4, (b"\xff\xff\xff",)))
        with pytest.raises((SessionLostError, ProtocolError)):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                session.synchronize()
        with skyproxy.connect(worker.url, token=worker.token) as other:
            assert torch.ones(2, device=other.devices[0]).sum().item() == 2
    finally:
        worker.stop()


# --- modules ---------------------------------------------------------------------------------------------------------


def large_model() -> nn.Module:
    torch.manual_seed(5)
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.BatchNorm1d(256))
    tied = nn.Linear(256, 256)
    tied.weight = module[0].weight  # type: ignore[union-attr]
    module.append(tied)
    module.register_buffer("table", torch.randn(40_000))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    return module


class Gathered:
    """How many uploads of a session were on their way at once."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        uploads = session._uploads
        self.most = 0
        open_jobs: set[int] = set()
        put, write = uploads._jobs.put, uploads._write

        class Jobs:
            def put(_, job: Any) -> None:
                if job is not None:
                    open_jobs.add(job.transfer)
                    self.most = max(self.most, len(open_jobs))
                put(job)

            def __getattr__(_, name: str) -> Any:
                return getattr(plain, name)

        def written(job: Any) -> None:
            # Until the program has asked for three, nothing leaves: it must not wait for what is on its way.
            deadline = time.monotonic() + 20
            while self.most < 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            write(job)
            open_jobs.discard(job.transfer)

        plain = uploads._jobs
        monkeypatch.setattr(uploads, "_jobs", Jobs())
        monkeypatch.setattr(uploads, "_write", written)


def test_a_modules_uploads_overlap(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = large_model()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    parameters = dict(module.named_parameters())
    gathered = Gathered(DEVICES.of(sky).session, monkeypatch)
    module.to(sky)
    assert gathered.most >= 3
    for name, value in module.state_dict().items():
        assert type(value) is RemoteTensor
        assert torch.equal(value.cpu(), expected[name])
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name]
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.cpu(), gradients[name])
    assert module[0].weight is module[-1].weight  # type: ignore[index]
    module.cpu()
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name])


def test_what_was_moved_may_change_at_once(sky: str) -> None:
    module = large_model()
    sources = [parameter.data for parameter in module.parameters()]
    expected = [source.clone() for source in sources]
    module.to(sky)
    for source in sources:
        source.fill_(-1)
    for parameter, value in zip(module.parameters(), expected):
        assert torch.equal(parameter.detach().cpu(), value)


def test_a_move_with_a_conversion_moves_the_converted_values(sky: str) -> None:
    module = large_model()
    expected = {name: value.bfloat16() for name, value in module.state_dict().items() if value.is_floating_point()}
    module.to(sky, torch.bfloat16)
    for name, value in module.state_dict().items():
        if name in expected:
            assert torch.equal(value.cpu(), expected[name])


def test_conversions_on_one_side_are_done_once(sky: str) -> None:
    for place in ("cpu", sky):
        module = large_model().to(place)
        expected = {
            name: value.cpu().half() for name, value in module.state_dict().items() if value.is_floating_point()
        }
        calls: list[int] = []

        def half(tensor: torch.Tensor) -> torch.Tensor:
            calls.append(id(tensor))  # noqa: B023
            return tensor.half() if tensor.is_floating_point() else tensor

        module._apply(half)
        tensors = sum(1 for _ in module.parameters()) * 2 + sum(1 for _ in module.buffers())
        assert len(calls) <= tensors + 2  # the tied one is met twice, with its gradient
        for name, value in module.state_dict().items():
            if name in expected:
                assert torch.equal(value.cpu(), expected[name])


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs pthread_kill")
def test_ctrl_c_during_a_move_leaves_the_module_as_it_was(slow_link: Link) -> None:
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24)))
    expected = [parameter.detach().clone() for parameter in module.parameters()]
    uploads = slow_link.session._uploads
    main = threading.get_ident()

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not uploads.busy and time.monotonic() < deadline:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        module.to(slow_link.device)
    thread.join(20)
    for parameter, value in zip(module.parameters(), expected):
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter.detach(), value)
    assert torch.ones(3, device=slow_link.device).sum().item() == 3
    slow_link.session.synchronize()


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_large_transfer_takes_little_memory_beside_the_tensor() -> None:
    """Upload and download of 256 MiB: at most 64 MiB more than the tensor itself, on either side."""
    watch_module = importlib.import_module("_memory_watch")
    size, allowed = 256 * MIB, 64 * MIB
    with skyproxy.launch_local("cpu") as node:
        device = node.devices[0]
        assert node.process_id is not None
        torch.ones(8 * MIB, dtype=torch.uint8).to(device).cpu()  # both sides have made their buffers
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        watch = watch_module.MemoryWatch([os.getpid(), node.process_id])
        try:
            extra: dict[str, Callable[[int, int], tuple[int, int]]] = {
                "upload": lambda own, theirs: (own, theirs - size),
                "download": lambda own, theirs: (own - size, theirs),
            }
            values: dict[str, torch.Tensor] = {}
            for name, moved in (("upload", lambda: source.to(device)), ("download", lambda: values["upload"].cpu())):
                watch.start()
                values[name] = moved()
                node.synchronize()
                own, theirs = (peak.most - peak.before for peak in watch.stop())
                for side, extra_bytes in zip(("client", "worker"), extra[name](own, theirs)):
                    assert extra_bytes <= allowed, f"{name}: {side} took {extra_bytes / MIB:.0f} MiB"
            assert torch.equal(values["download"], source)
        finally:
            watch.close()
