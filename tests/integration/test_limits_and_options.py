"""Settings do what their page says: limits that are tiny, lines, launch blocking, and the counters that show it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

import skyproxy
from skyproxy.tensor.core.devices import DEVICES
from tests.integration.programs import succeed

TINY = {
    "SKYPROXY_MAX_INLINE_BYTES": "16",
    "SKYPROXY_CHUNK_BYTES": "1000",
    "SKYPROXY_MAX_BATCH_COMMANDS": "1",
    "SKYPROXY_MAX_IN_FLIGHT_BYTES": "1",
    "SKYPROXY_MAX_IN_FLIGHT_BATCHES": "1",
    "SKYPROXY_MAX_CACHED_SHAPES": "4",
    "SKYPROXY_PROMPT_RELEASE_BYTES": "0",
}


def test_tiny_limits_are_honoured_and_do_not_change_results() -> None:
    source = """
    import torch, skyproxy
    from skyproxy.settings import SETTINGS
    assert SETTINGS.chunk_bytes == 1000
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    data = torch.randn(32, 8)
    import copy
    remote = copy.deepcopy(model).to("sky:0")
    for where, m in (("cpu", model), ("sky:0", remote)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            m(data.to(where)).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), remote.parameters()):
        torch.testing.assert_close(a, b.cpu())
    x = torch.arange(10_000.0)
    assert torch.equal((x.to("sky:0") * 2).cpu(), x * 2)
    assert all(len(device.cache) <= 4 for device in skyproxy.tensor.core.devices.DEVICES.existing())
    """
    succeed(source, **TINY)


def test_too_many_values_are_a_clear_error() -> None:
    source = """
    import torch, skyproxy
    kept = []
    try:
        for i in range(1000):
            kept.append(torch.zeros(2, device="sky:0"))
    except skyproxy.errors.LimitExceededError as error:
        assert "SKYPROXY_MAX_HANDLES" in str(error)
    else:
        raise AssertionError
    assert 90 <= len(kept) <= 100, len(kept)
    del kept[10:]
    assert (kept[0] + 1).tolist() == [1, 1]
    """
    succeed(source, SKYPROXY_MAX_HANDLES="100")


def test_lines_can_be_switched_off() -> None:
    source = """
    import torch, skyproxy
    bad = torch.nn.functional.embedding(torch.full((1,), 7, device="sky:0"), torch.zeros(3, 2, device="sky:0"))
    try:
        bad.cpu()
    except IndexError as error:
        print("<string>" in str(error), error.op)
    """
    assert succeed(source, SKYPROXY_RECORD_LINES="0") == "False aten::embedding"


def test_launch_blocking_raises_each_error_at_its_own_statement() -> None:
    source = """
    import torch, skyproxy, traceback
    rows, number = torch.zeros(3, 2, device="sky:0", requires_grad=True), torch.full((1,), 7, device="sky:0")
    large = torch.ones(2_000_000).to("sky:0")
    model = torch.nn.Linear(2, 2).to("sky:0")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device="sky:0")).sum().backward()
    optimizer.step()
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        result = large + 1
    graph.replay()
    try:
        torch.nn.functional.embedding(number, rows)
        raise AssertionError("nothing was raised")
    except IndexError as error:
        print(error.op, result[0].item(), (number + 1).item(), torch.sky.stats()["round_trips"] > 20)
    """
    assert succeed(source, SKYPROXY_LAUNCH_BLOCKING="1") == "aten::embedding 2.0 8 True"


def test_launch_blocking_raises_the_error_of_a_captured_step_where_it_is_replayed() -> None:
    source = """
    import torch, skyproxy
    rows, number = torch.zeros(3, 2, device="sky:0"), torch.zeros(1, dtype=torch.int64, device="sky:0")
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        chosen = rows[number]
    graph.replay()
    number.fill_(9)
    try:
        graph.replay()
        raise AssertionError("nothing was raised")
    except IndexError as error:
        print(error.op)
    torch.sky.synchronize()
    """
    assert succeed(source, SKYPROXY_LAUNCH_BLOCKING="1") == "aten::index.Tensor"


def test_many_small_uploads_in_a_row_do_not_pile_up(sky: str) -> None:
    session = DEVICES.of(sky).session
    piece = torch.arange(10_000.0)
    kept = []
    most = 0
    for _ in range(2500):  # 100 MB in all, more than a frame may have
        kept.append(piece.to(sky))
        most = max(most, len(session.recorder.stream), sum(map(len, session.recorder._buffers)) // 1000)
    assert most < 5000
    assert torch.equal(kept[-1].cpu(), piece)
    assert torch.equal(kept[1234].cpu(), piece)


def test_debug_syncs_names_each_line_that_waits(sky: str) -> None:
    x = torch.arange(3.0, device=sky)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with skyproxy.debug_syncs() as watch:
            first = sys._getframe().f_lineno + 1
            x.sum().item()
            y = x + 1
            y.tolist()
            if (y > 0).all():
                y.cpu()
            torch.sky.synchronize(sky)
        x.cpu()  # nobody looks any more
    lines = [(Path(w.filename).name, w.lineno - first) for w in seen if w.category is skyproxy.SyncWarning]
    assert lines == [(Path(__file__).name, offset) for offset in (0, 2, 3, 4, 5)]
    assert watch.count == 5


def test_stats_have_the_documented_keys_and_count(sky: str) -> None:
    before = torch.sky.stats()
    assert set(before) >= {
        "ops", "batches", "bytes_sent", "bytes_received", "round_trips", "cache_hits", "cache_misses", "handles"
    }  # fmt: skip
    x = torch.zeros(30_000, device=sky)
    for _ in range(10):
        x = x + 1
    x.cpu()
    after = torch.sky.stats()
    assert after["ops"] - before["ops"] == 11
    assert after["round_trips"] - before["round_trips"] == 1
    assert after["bytes_received"] - before["bytes_received"] > 120_000
    assert after["handles"] - before["handles"] == 1
