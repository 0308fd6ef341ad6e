"""Defects that were reproduced in the nearest remote-device peer; here each is what local PyTorch does.

One section for each line of the list in ACCEPTANCE.md. `torch.compile` has tests of its own.
"""

from __future__ import annotations

import copy
import gc
import io
import math
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import skyproxy
from skyproxy.errors import SessionLostError
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES
from tests.integration.programs import rows, started, succeed, worker

MIB = 1 << 20


def same(remote: torch.Tensor, local: torch.Tensor) -> None:
    """Both are equal, and look the same."""
    assert remote.device.type == "sky"
    assert remote.dtype is local.dtype
    assert remote.shape == local.shape
    torch.testing.assert_close(remote.cpu(), local, rtol=0, atol=0, equal_nan=True)


def round_trips(action: Callable[[], object]) -> int:
    before = torch.sky.stats()["round_trips"]
    action()
    return int(torch.sky.stats()["round_trips"] - before)


# --- a guessed boolean -----------------------------------------------------------------------------------------------


def test_a_flag_that_turns_true_is_seen(sky: str) -> None:
    x = torch.zeros(4, device=sky)
    seen = []
    for step in range(6):
        seen.append(bool((x > 3.5).any()))
        x += 1
        assert len(seen) == step + 1
    assert seen == [False, False, False, False, True, True]


def test_a_nan_guard_fires(sky: str) -> None:
    loss = torch.ones((), device=sky)
    fired = []
    for step in range(5):
        loss = loss * (float("inf") if step == 2 else 1.0)
        loss = loss - loss if step == 3 else loss
        fired.append((bool(torch.isnan(loss)), math.isnan(loss.item()), not torch.isfinite(loss)))
    assert fired == [(False, False, False)] * 2 + [(False, False, True)] + [(True, True, True)] * 2


def test_a_loop_that_stops_on_a_value_stops_at_the_right_step(sky: str) -> None:
    def generate(device: str) -> list[int]:
        torch.manual_seed(3)
        table = torch.randint(0, 50, (50,)).to(device)
        token, out = torch.tensor(7, device=device), []
        finished = torch.tensor(False, device=device)
        while len(out) < 64 and not finished:
            out.append(int(token))
            token = table[token]
            finished = (token == 7) | finished
        return out

    assert generate(sky) == generate("cpu")


def test_every_way_to_a_python_value_gives_the_workers_value(sky: str) -> None:
    x = torch.tensor([1.5, -2.0, 0.0], device=sky)
    for factor in (1, 2, 3):
        y = x * factor
        assert y[0].item() == 1.5 * factor
        assert float(y[1]) == -2.0 * factor
        assert int(y[1]) == -2 * factor
        assert bool(y[2]) is False
        assert y.tolist() == [1.5 * factor, -2.0 * factor, 0.0]
        assert list(range(5))[torch.tensor(factor, device=sky)] == factor
        assert f"{y[0]:.2f}" == f"{1.5 * factor:.2f}"
        assert torch.equal(y, x * factor)
        assert not torch.equal(y, x * (factor + 1))
        assert torch.allclose(y, x * factor)
        assert not torch.allclose(y, x * (factor + 1))
        assert (y == x * factor).all()


# --- large downloads, and the server's death -------------------------------------------------------------------------


@pytest.mark.parametrize("mebibytes", [15, 16, 17, 64])
def test_large_downloads_arrive_whole_and_later_calls_work(sky: str, mebibytes: int) -> None:
    count = mebibytes * MIB // 8
    x = torch.arange(count, device=sky)
    local = x.cpu()
    assert torch.equal(local, torch.arange(count))
    assert (x[-1] + 1).item() == count
    back = local.to(sky)
    assert torch.equal(back, x)


def test_after_the_death_of_the_worker_nothing_hangs(sky: str) -> None:
    with skyproxy.launch_local("cpu") as node:
        x = torch.ones(3, device=node.devices[0])
        x.cpu()
        psutil.Process(node.process_id).kill()
        for _ in range(3):
            with pytest.raises(SessionLostError):
                x.sum().item()


# --- two clients on one worker ---------------------------------------------------------------------------------------

CLIENT = """
import json, os, sys, torch, skyproxy
number = int(sys.stdin.readline())
torch.manual_seed(number)
tensors = [torch.full((50,), float(number * 1000 + i), device="sky:0") for i in range(50)]
drawn = torch.rand(3, device="sky:0")
for i in range(0, 50, 3):
    tensors[i] = tensors[i] + 0
print(json.dumps("ready"), flush=True)
sys.stdin.readline()
good = all(bool((t == number * 1000 + i).all()) for i, t in enumerate(tensors))
drawn = torch.cat([drawn, torch.rand(3, device="sky:0")])
torch.manual_seed(number)
print(json.dumps([good, torch.equal(drawn.cpu(), torch.cat([torch.rand(3), torch.rand(3)]))]), flush=True)
sys.stdin.readline()
del tensors
torch.sky.synchronize()
print(json.dumps("done"), flush=True)
"""


def test_two_processes_on_one_worker_do_not_see_each_other(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        extra = {"SKYPROXY_URL": url, "SKYPROXY_TOKEN": token}
        with started(CLIENT, **extra) as first, started(CLIENT, **extra) as second:

            def say(program, text: str) -> object:
                program.stdin.write(text + "\n")
                program.stdin.flush()
                line = program.stdout.readline()
                assert line, program.stderr.read()
                return rows(line)[0]

            assert say(first, "1") == "ready"
            assert say(second, "2") == "ready"
            assert say(first, "") == [True, True]
            assert say(first, "") == "done"  # its tensors are gone, the other's are not
            assert say(second, "") == [True, True]


def test_two_sessions_of_one_process_on_one_worker(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        with skyproxy.connect(url, token=token) as a, skyproxy.connect(url, token=token) as b:
            x, y = torch.arange(5.0, device=a.devices[0]), torch.arange(5.0, device=b.devices[0]) * 10
            assert (x + 1).tolist() == [1, 2, 3, 4, 5]
            assert (y + 1).tolist() == [1, 11, 21, 31, 41]
            with pytest.raises(RuntimeError, match="same device"):
                x + y
            a.close()
            assert (y + 2).tolist() == [2, 12, 22, 32, 42]


# --- results whose size depends on values ----------------------------------------------------------------------------

DATA_DEPENDENT: dict[str, Callable[[torch.Tensor], object]] = {
    "mask": lambda x: x[x > 2],
    "mask of rows": lambda x: x.view(2, 4)[torch.tensor([True, False], device=x.device)],
    "nonzero": lambda x: x.nonzero(),
    "nonzero tuple": lambda x: x.view(2, 4).nonzero(as_tuple=True),
    "where": lambda x: torch.where(x > 2),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique of a dim": lambda x: torch.unique(x.view(4, 2), dim=0),
    "unique consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "bincount weights": lambda x: torch.bincount(x.long(), weights=x * 0.5, minlength=12),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
    "repeat_interleave of another": lambda x: torch.repeat_interleave(x, x.long(), dim=0),
    "masked_select": lambda x: x.masked_select(x < 4),
    "argwhere": lambda x: torch.argwhere(x > 1),
    "count": lambda x: x.count_nonzero(),
    "to_sparse": lambda x: x.view(2, 4).to_sparse().to_dense(),
    "to_sparse indices": lambda x: x.view(2, 4).to_sparse().indices(),
    "to_sparse_csr": lambda x: x.view(2, 4).to_sparse_csr().crow_indices(),
    "histc": lambda x: torch.histc(x, bins=4),
    "one_hot": lambda x: nn.functional.one_hot(x.long()),
    "combinations": lambda x: torch.combinations(x[x > 3]),
    "pack": lambda x: nn.utils.rnn.pack_sequence([x[:3], x[:2]]).data,
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_sizes_that_depend_on_values(sky: str, sky1: str, name: str) -> None:
    local = torch.tensor([0.0, 3, 1, 4, 1, 5, 0, 2])
    expected = DATA_DEPENDENT[name](local)
    for device in (sky, sky1):
        result = DATA_DEPENDENT[name](local.to(device))
        pairs = zip(result, expected) if isinstance(expected, tuple) else [(result, expected)]
        for remote, wanted in pairs:
            same(remote, wanted)


def test_gradients_flow_through_a_mask(sky: str) -> None:
    local = torch.arange(6.0, requires_grad=True)
    remote = local.detach().to(sky).requires_grad_()
    for x in (local, remote):
        (x[x > 2] ** 2).sum().backward()
    assert torch.equal(remote.grad.cpu(), local.grad)


# --- slices and bfloat16 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_slices_travel_both_ways_as_they_are(sky: str, dtype: torch.dtype) -> None:
    local = (torch.arange(64 * 1000) % 5).reshape(64, 1000).to(dtype)
    remote = local.to(sky)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[3],
        lambda t: t[:, 5],
        lambda t: t[10:20, 100:900],
        lambda t: t[::3, ::7],
        lambda t: t.t()[2:5],
        lambda t: t[63, 999],
        lambda t: t[5:5],
        lambda t: t[1:2].expand(4, 1000),
    ]
    wide = torch.complex128 if dtype.is_complex else torch.float64  # not every dtype can be compared
    for view in views:
        expected = view(local)
        for result in (view(remote).cpu(), expected.to(sky).cpu()):
            assert result.dtype is dtype
            assert torch.equal(result.to(wide), expected.to(wide))


def test_a_slice_sends_its_own_bytes_only(sky: str) -> None:
    base = torch.zeros(8 * MIB, dtype=torch.bfloat16)
    before = torch.sky.stats()
    remote = base[:1000].to(sky)
    middle = torch.sky.stats()
    assert middle["bytes_sent"] - before["bytes_sent"] < 100_000
    large = base.to(sky)
    before = torch.sky.stats()
    large[500:1500].cpu()
    remote.cpu()
    assert torch.sky.stats()["bytes_received"] - before["bytes_received"] < 100_000


# --- one failing op --------------------------------------------------------------------------------------------------


def test_a_failing_op_leaves_its_batch_mates_and_says_where_it_was(sky: str) -> None:
    before = [torch.full((3,), float(i), device=sky) for i in range(10)]
    bad = torch.zeros(3, device=sky)[torch.tensor([5], device=sky)]
    after = [b * 2 for b in before]
    assert [a.tolist() for a in after] == [[2.0 * i] * 3 for i in range(10)]
    with pytest.raises(IndexError, match=r"aten::index[^\n]*\n[^\n]*test_defects\.py:\d+"):
        bad.cpu()
    assert after[-1].tolist() == [18, 18, 18]


# --- random numbers --------------------------------------------------------------------------------------------------


def test_manual_seed_makes_the_same_numbers_as_locally(sky: str) -> None:
    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(42)
        drop = nn.Dropout(0.5)
        return [
            torch.rand(5, device=device),
            torch.randn(2, 3, device=device),
            torch.randint(0, 100, (7,), device=device),
            torch.randperm(10, device=device),
            drop(torch.ones(20, device=device)),
            torch.bernoulli(torch.full((9,), 0.3, device=device)),
            torch.multinomial(torch.ones(5, device=device), 3),
            torch.empty(4, device=device).normal_(2.0, 3.0),
            torch.normal(torch.zeros(3, device=device), torch.ones(3, device=device)),
        ]

    for remote, local, again in zip(draw(sky), draw("cpu"), draw(sky), strict=True):
        same(remote, local)
        same(again, local)


def test_generators_are_accepted(sky: str) -> None:
    local, remote = torch.Generator().manual_seed(5), torch.Generator(sky).manual_seed(5)
    same(torch.rand(4, generator=remote, device=sky), torch.rand(4, generator=local))
    same(torch.randperm(9, generator=remote, device=sky), torch.randperm(9, generator=local))
    state = remote.get_state()
    first = torch.randn(3, generator=remote, device=sky)
    remote.set_state(state)
    assert torch.equal(torch.randn(3, generator=remote, device=sky), first)


def test_random_state_is_saved_and_restored(sky: str) -> None:
    state = torch.sky.get_rng_state(sky)
    first = torch.rand(5, device=sky)
    torch.sky.set_rng_state(state, sky)
    assert torch.equal(torch.rand(5, device=sky), first)
    with torch.random.fork_rng(devices=[torch.device(sky).index], device_type="sky"):
        torch.rand(5, device=sky)
        inner = torch.sky.get_rng_state(sky)
    assert not torch.equal(inner, torch.sky.get_rng_state(sky))


# --- synchronize and events ------------------------------------------------------------------------------------------


def test_synchronize_really_waits_and_events_measure(sky: str) -> None:
    x = torch.full((512, 512), 1 / 512, device=sky)
    x.cpu()
    start, end = torch.sky.Event(enable_timing=True), torch.sky.Event(enable_timing=True)
    start.record()
    y = x
    for _ in range(100):
        y = y @ x
    end.record()
    torch.sky.synchronize(sky)
    assert round_trips(lambda: None) == 0
    # All of it is done: to ask for the value costs no more than the way there and back.
    milliseconds = start.elapsed_time(end)
    assert milliseconds > 1
    import time

    begun = time.monotonic()
    y[0, 0].item()
    assert time.monotonic() - begun < max(0.2, milliseconds / 2000)
    assert end.query()
    end.synchronize()
    torch.sky.current_stream().synchronize()
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(torch.sky.Event(enable_timing=True))


# --- features that failed there --------------------------------------------------------------------------------------


def test_autocast_computes_as_locally(sky: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    twin = copy.deepcopy(model).to(sky)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        local = model(x)
    with torch.autocast("sky", dtype=torch.bfloat16):
        remote = twin(x.to(sky))
    assert remote.dtype is local.dtype is torch.bfloat16
    torch.testing.assert_close(remote.cpu(), local)
    remote.float().sum().backward()
    local.float().sum().backward()
    torch.testing.assert_close(twin[0].weight.grad.cpu(), model[0].weight.grad, rtol=1e-2, atol=1e-2)


def test_saving_and_loading(sky: str, sky1: str) -> None:
    model = nn.Linear(3, 2).to(sky)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 3}, file)
    for where in ("cpu", sky, sky1):
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        assert loaded["model"]["weight"].device == torch.device(where)
        assert torch.equal(loaded["model"]["weight"].cpu(), model.weight.detach().cpu())
    file.seek(0)
    assert torch.load(file, weights_only=True)["model"]["bias"].device == torch.device(sky)
    model.load_state_dict(loaded["model"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(sky: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    twin = copy.deepcopy(block).to(sky)
    gradients = []
    for module, device in ((block, "cpu"), (twin, sky)):
        torch.manual_seed(1)
        x = torch.ones(3, 4, device=device, requires_grad=True)
        checkpoint(module, x, use_reentrant=reentrant).sum().backward()
        gradients.append((x.grad.cpu(), module[0].weight.grad.cpu()))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(sky: str, dtype: torch.dtype) -> None:
    local = torch.linspace(-3, 3, 50)
    remote = local.to(sky).to(dtype)
    assert remote.dtype is dtype
    assert torch.equal(remote.cpu().float(), local.to(dtype).float())
    assert torch.equal(local.to(dtype).to(sky).float().cpu(), local.to(dtype).float())


def test_memory_questions_have_answers(sky: str) -> None:
    free, total = torch.sky.mem_get_info(sky)
    assert 0 < free <= total
    before = torch.sky.memory_allocated(sky)
    kept = torch.zeros(MIB, device=sky)
    assert torch.sky.memory_allocated(sky) - before >= 4 * MIB
    del kept
    torch.sky.synchronize(sky)
    assert torch.sky.memory_allocated(sky) - before < 4 * MIB
    assert torch.sky.get_device_properties(sky).total_memory > 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(sky: str, kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = kind(4, 6, num_layers=2, batch_first=True, bidirectional=True)
    twin = copy.deepcopy(model).to(sky)
    x = torch.randn(3, 5, 4)
    outputs = []
    for module, inputs in ((model, x), (twin, x.to(sky))):
        out, _ = module(inputs)
        out.square().sum().backward()
        outputs.append([out.detach().cpu(), *(p.grad.cpu() for p in module.parameters())])
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- leaks and caches ------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_the_client_does_not_grow_with_the_number_of_operations(sky: str) -> None:
    x = torch.ones(8, device=sky)

    def operations(count: int) -> None:
        y = x
        for _ in range(count // 4):
            y = (y * 0.5 + x).clamp(max=2).neg()
        y.cpu()

    operations(20_000)
    memory, handles = resident_bytes(), torch.sky.stats()["handles"]
    operations(100_000)
    assert resident_bytes() - memory < 2 * MIB
    assert torch.sky.stats()["handles"] == handles


def test_the_shape_cache_is_bounded(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyproxy.tensor.core import devices

    class Small:
        max_cached_shapes = 64

    monkeypatch.setattr(devices, "SETTINGS", Small)
    chosen = DEVICES.of(sky)
    entries = dict(chosen.cache)
    chosen.cache.clear()
    for n in range(200):
        result = torch.ones(n + 2, device=sky) + 1
        assert len(chosen.cache) <= 64
    assert result.shape == (201,)
    assert result.sum().item() == 402
    chosen.cache.update(entries)
    assert SETTINGS.max_cached_shapes >= 4096


def misses(action: Callable[[], object]) -> int:
    before = torch.sky.stats()["cache_misses"]
    action()
    return int(torch.sky.stats()["cache_misses"] - before)


def test_changing_numbers_hit_the_cache(sky: str) -> None:
    x = torch.ones(4, device=sky)

    def use(number: int) -> None:
        y = x * (0.1 * number) + number
        y.add_(x, alpha=1e-3 / (number + 1))
        y.clamp_(-number, number)
        y.mul_(1.0 / (number + 1))
        (y**2.0).lerp_(x, 0.01 * number)
        y.addcdiv_(x, x, value=float(number))
        y.masked_fill_(y > number, float(number))
        torch.full_like(y, number * 1.5)

    use(1)
    use(2)
    assert misses(lambda: [use(n) for n in range(3, 60)]) == 0


def test_a_learning_rate_schedule_hits_the_cache(sky: str) -> None:
    model = nn.Linear(4, 4).to(sky)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    data = torch.ones(2, 4, device=sky)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    for _ in range(3):
        step()
    assert misses(lambda: [step() for _ in range(20)]) == 0


def test_a_growing_position_needs_no_inference_by_fake_tensors(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position in a buffer is a new number each time, and each shape is new: our own rules are fast there."""
    from skyproxy.tensor.dispatch import inference

    cache = torch.zeros(1, 200, 4, device=sky)
    query = torch.ones(1, 1, 4, device=sky)

    def write(position: int) -> None:
        cache[:, position : position + 1] = query
        cache[0, position] *= 3.0
        cache[0, position].add_(query[0, 0], alpha=-2)
        seen = torch.cat([cache[:, :position], query], 1)
        weights = torch.softmax(query @ seen.transpose(1, 2) * 0.5, -1)
        ((weights @ seen)[:, 0] + cache[0, position] * 2).relu()

    for position in (1, 2, 3):
        write(position)
    calls: list[str] = []
    original = inference._infer_by_fake
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: calls.append(call.plan.name) or original(call))
    for position in range(4, 60):
        write(position)
    assert set(calls) <= {"aten::view"}  # of a transposed batch, once a step
    assert len(calls) <= 56
    assert cache[0, :62].sum(1).tolist() == [0.0] + [4.0] * 59 + [0.0, 0.0]


# --- copies, tokens, source text -------------------------------------------------------------------------------------


def test_outputs_and_uploads_take_their_memory_once_on_the_worker(sky: str) -> None:
    size = 256 * MIB
    with skyproxy.launch_local("cpu") as node:
        device = node.devices[0]
        torch.ones(MIB, device=device).cpu()
        process = psutil.Process(node.process_id)
        base = peak(process)
        data = torch.ones(size // 4)
        remote = data.to(device)
        torch.sky.synchronize(device)
        assert peak(process) - base < 1.3 * size
        result = remote * 2
        torch.sky.synchronize(device)
        assert peak(process) - base < 2.3 * size
        assert result[-1].item() == 2


def peak(process: psutil.Process) -> int:
    """The most memory that a process ever had, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


@pytest.fixture
def local_node(sky: str) -> Iterator[skyproxy.Node]:
    with skyproxy.launch_local("cpu") as node:
        yield node


def test_a_worker_cannot_be_used_without_its_token(local_node: skyproxy.Node) -> None:
    host, port = local_node.url.removeprefix("ws://").split(":")
    request = (
        f"GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(request.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 401")


def test_the_token_is_in_no_list_of_processes(local_node: skyproxy.Node) -> None:
    token = local_node._worker.token  # type: ignore[union-attr]
    for process in psutil.Process().children(recursive=True):
        assert token not in " ".join(process.cmdline())
        assert token not in " ".join(process.environ().values())
    assert token not in " ".join(psutil.Process().cmdline())


def test_an_unencrypted_worker_for_other_machines_is_refused(tmp_path: Path) -> None:
    source = """
    import sys
    from skyproxy_server.__main__ import main
    sys.exit(0 if main(["--host", "0.0.0.0", "--port", "0", "--device", "cpu", "--log-level", "error"]) == 2 else 1)
    """
    import subprocess

    from tests.integration.programs import run_program

    done: subprocess.CompletedProcess[str] = run_program(source, SKYPROXY_TOKEN="t" * 40)
    assert done.returncode == 0
    assert "without TLS" in done.stderr


def test_a_definition_is_never_executed_as_source_text() -> None:
    """What a client may name is looked up in tables; text of its making stands in no generated code."""
    from skyproxy.errors import ProtocolError
    from skyproxy_server.signatures import Signature

    evil = "__import__('os').system('false')"
    for definition in (
        ["aten::relu", [evil], {}, ["n"]],
        ["aten::add.Tensor", ["t", "t"], {evil: "v"}, ["n"]],
        ["aten::add.Tensor", ["t", "t"], {"alpha": evil}, ["n"]],
        ["aten::relu", ["t"], {}, [evil]],
        ["aten::relu", [["c", evil, 1]], {}, ["n"]],
        ["aten::relu", [["k", evil]], {}, ["n"]],
    ):
        with pytest.raises(ProtocolError):
            Signature(definition, on_cpu=True)
    for name in (evil, f"aten::{evil}", "aten::__class__", "builtins::eval", "aten::relu.__globals__"):
        refused = Signature([name, ["t"], {}, ["n"]], on_cpu=True)
        with pytest.raises(NotImplementedError):
            refused.handler({0: None, 1: torch.ones(1)}, [32, 1, 2], 0)


def test_plain_imports_need_no_worker() -> None:
    succeed("import skyproxy, torch; assert torch.sky.is_available(); assert not torch.sky.is_initialized()")
